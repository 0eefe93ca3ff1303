"""Chrome traces as files: read one into a value, annotate one with modules, merge those of several ranks, convert one. No torch."""
