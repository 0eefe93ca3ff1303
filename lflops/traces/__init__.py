"""Chrome traces as files: annotate one with modules, merge those of several ranks, convert one for torch-tb-profiler. No torch."""
