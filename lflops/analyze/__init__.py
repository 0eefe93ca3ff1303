"""From a profile to results: pure functions without torch, printing or rounding. Each folder answers one question."""
