"""Why a step or a run takes as long as it does: one file for each rule. No torch."""
