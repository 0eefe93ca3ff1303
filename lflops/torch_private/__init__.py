"""All uses of private torch names in lflops, grouped by subject. `self_check` tests each name."""
