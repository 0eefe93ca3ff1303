"""Why a step takes as long as it does: causes, each with what it costs. No torch."""
