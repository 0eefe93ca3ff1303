"""The dispatch mode that sees every operator: MACs, FLOPs, bytes, live memory, collectives, and from them a `Profile`."""
