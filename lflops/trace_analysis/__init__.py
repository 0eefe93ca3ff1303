"""What a trace says, as pure functions of a `RecordedTrace`: timeline, idle time, kernels, operators, modules, collectives."""
