"""MACs, FLOPs, bytes and live memory of a step, by module: the dispatch mode that sees every operator, and what it adds up."""
