"""The matrix of all cases: some traits are combined with each other, others are tried alone."""

from collections.abc import Iterator

from lflops.monitoring.schedule import Schedule
from tests.harmless.case import Case, crossed

__all__ = ["AXES", "CASES"]

# The names of the drivers.
LOOP = "your own loop"
LIGHTNING = "Lightning"
TRANSFORMERS = "transformers"
ACCELERATE = "Accelerate"
FABRIC = "Fabric"

# Axes: lists of names of traits, which the drivers define.
LOGS = [
    "log",
    "log on_step",
    "log on_epoch",
    "log sync_dist",
    "log prog_bar",
    "log sum",
    "log max",
    "log batch_size",
    "log_dict",
]
MORE_LOGS = [
    "log rank_zero_only",
    "log number",
    "log metric object",
    "log metric collection",
    "log twice",
    "log to the logger",
]
PLACES = [
    "in on_train_epoch_end",
    "in on_before_optimizer_step",
    "in on_validation_epoch_end",
    "in callback's on_train_batch_end",
    "in callback's on_train_epoch_end",
    "in callback's on_validation_epoch_end",
]
LOGGED = [
    "logs each step",
    "logs each 3 steps",
    "logs at the epoch's end",
    "logs the first step",
    "logs nothing",
]
VALIDATED = [
    "validated",
    "validated at times",
    "validated at fractions",
    "validated, no sanity check",
    "validated with gradients",
]
EVALUATED = ["evaluated", "evaluated each epoch", "evaluated at the start", "metrics"]
SAVED = ["checkpoint every 3 steps", "checkpoint of the best", "checkpoint at the epoch's end"]
SAVES = ["saved", "the best is loaded", "resumed", "early stopping"]
CALLBACKS = [
    "early stopping in steps",
    "learning rates",
    "SWA",
    "EMA",
    "accumulation scheduled",
    "device stats",
    "throughput",
    "timer",
]
CALLBACKS += ["early stopping", "progress", "lambda callback", "lr finder", "batch size finder"]
OPTIONS = [
    "clipped by value",
    "bf16",
    "bf16 true",
    "double",
    "two epochs",
    "in steps",
    "no inference mode",
    "fast_dev_run",
    "one batch",
]
OPTIONS += [
    "overfit",
    "deterministic",
    "anomaly",
    "loaders reloaded",
    "model summary",
    "log every step",
    "barebones",
]
LOGGERS = ["csv logger", "tensorboard", "no logger"]
PROFILERS = ["simple profiler", "advanced profiler", "torch profiler"]
MODULES = [
    "manual",
    "scheduler each step",
    "scheduler on a plateau",
    "LBFGS",
    "fused optimizer",
    "no optimizer",
    "returns a dict",
]
MODULES += [
    "skips some",
    "ends epochs",
    "overrides",
    "looks at the strategy",
    "takes the iterator",
    "compiled",
]
DATA = ["stream", "workers", "data module", "data module, per cluster"]
MODELS = [
    "batch norm",
    "cond",
    "scan",
    "map",
    "while_loop",
    "recomputed",
    "recomputed, reentrant",
    "autograd function",
    "vmap and grad",
]
MODELS += [
    "gradient penalty",
    "LSTM",
    "attention",
    "tied and called twice",
    "parametrized",
    "copies itself",
    "in place",
]
ODD = [
    "None",
    "string",
    "dict",
    "dict subclass",
    "frozen dataclass",
    "named tuple",
    "opaque object",
    "generator",
    "iterator",
    "nested lists",
]
ODD += [
    "number",
    "function",
    "list that holds itself",
    "distribution",
    "sparse tensor",
    "set of texts",
]
OUTPUTS = [f"output {name}" for name in ODD]
PARTS = [
    "dict",
    "nested",
    "dataclass",
    "strings",
    "None",
    "sparse COO",
    "integer COO",
    "integer CSR",
    "integer COO as input_ids",
]
PARTS += [
    "0-d attention_mask",
    "0-d position_ids",
    "position_ids",
    "nested tensors",
    "packed sequence",
    "complex and bool",
    "empty",
]
PARTS += ["meta", "numbers", "lazy", "opaque", "recursive"]
BATCHES = [f"batch {name}" for name in PARTS]
ENDINGS = [
    "raises",
    "raises at once",
    "KeyboardInterrupt",
    "SystemExit",
    "StopIteration",
    "should_stop",
    "left early",
]
STAGES = ["fits twice", "all stages", "validates alone", "tests alone", "predicts alone"]
OPTIMIZERS = ["SGD", "fused", "foreach", "Adafactor"]
STEPS = [
    "accumulated",
    "clipped",
    "scheduled",
    "autocast",
    "scaled gradients",
    "gradient kept in place",
    "moving average",
]
HOOKS = [
    "global module hooks",
    "global hook that replaces",
    "module hooks",
    "hook with kwargs",
    "hook that raises",
    "tensor hooks",
]
HOOKS += ["optimizer hooks", "own dispatch mode", "saved tensors hooks"]
ON_THE_WAY = [f"{deed} on the way" for deed in ("copied", "pickled", "saved", "frozen", "replaced")]
SETTINGS = [
    "anomaly mode",
    "deterministic",
    "on a thread",
    "generator of batches",
    "no batch given",
    "two models",
    "curves",
]
COMPILED = ["compiled: eager", "compiled: aot_eager", "compiled module: eager"]
ARGUMENTS = [
    "not clipped",
    "bf16",
    "cosine",
    "plateau",
    "epochs",
    "NaN kept",
    "label smoothing",
    "full determinism",
]
LANGUAGE = ["GPT-2", "GPT-2, checkpointed", "GPT-2, noise", "tokens counted"]
STRATEGIES = ["own strategy", "FSDP2", "tensor parallel", "static graph", "unused parameters"]

EVERY_STAGE = {"stages": ("train", "validate", "test", "predict")}
TRACED = {"trace": True, "html": True}
"""The default settings of the monitor, which are not the usual ones of a case."""


def _loops() -> Iterator[Case]:
    yield from crossed(
        LOOP,
        (1,),
        [
            "",
            *MODELS,
            *OUTPUTS,
            *BATCHES,
            *OPTIMIZERS,
            "LBFGS",
            *STEPS,
            *SETTINGS,
            *ON_THE_WAY,
            *COMPILED,
        ],
    )
    yield from crossed(
        LOOP, (1,), ["cond", "scan", "map"], ["autocast", "accumulated", "anomaly mode"]
    )
    yield from crossed(LOOP, (1,), ["accumulated"], ["clipped", "autocast", "validated"])
    yield from crossed(
        LOOP, (1,), ["raises", "KeyboardInterrupt", "SystemExit", "left early"], ["", "accumulated"]
    )
    yield from crossed(LOOP, (1,), HOOKS, ["", "recomputed"])
    yield from crossed(LOOP, (1,), ["two monitors", "watched twice"])
    yield from crossed(
        LOOP, (1,), ["validated"], ["", "evaluated in inference mode"], **EVERY_STAGE
    )
    yield from crossed(LOOP, (1,), ["measured peaks"], ["global module hooks"])
    yield from crossed(
        LOOP, (1,), ["", "global module hooks", "own dispatch mode", "cond", "raises"], **TRACED
    )
    yield from crossed(
        LOOP, (1,), ["never left"], **TRACED, schedule=Schedule(wait=2, warmup=2, active=20)
    )
    yield from crossed(
        LOOP,
        (2,),
        ["", "gathered losses", "static graph", "unused parameters", "FSDP2", "tensor parallel"],
    )
    yield from crossed(LOOP, (2,), ["no_sync"], ["accumulated"])
    yield from crossed(LOOP, (2,), ["batch integer COO", "batch norm", "recomputed"])
    yield from crossed(LOOP, (4,), ["", "FSDP2"])


def _lightning() -> Iterator[Case]:
    # Every form of self.log, where it is called, on one rank and on two.
    yield from crossed(LIGHTNING, (1, 2), LOGS, ["", "in validation_step"])
    yield from crossed(
        LIGHTNING, (1,), ["log", "log on_epoch", "log_dict", "log metric object"], ["two epochs"]
    )
    yield from crossed(LIGHTNING, (2,), LOGS, ["no logger"])
    yield from crossed(LIGHTNING, (2,), ["log", "log_dict"], ["two epochs"], track=False)
    yield from crossed(LIGHTNING, (1, 2), ["looks at the strategy"], ["two epochs"], track=False)
    yield from crossed(LIGHTNING, (1, 2), MORE_LOGS)
    yield from crossed(LIGHTNING, (1, 2), ["log"], PLACES)
    yield from crossed(
        LIGHTNING, (2,), ["log sync_dist"], ["in on_train_epoch_end", "in on_validation_epoch_end"]
    )
    # Validation and checkpoints, alone and with traits that change the steps.
    yield from crossed(LIGHTNING, (1, 2), VALIDATED, ["log sync_dist"])
    yield from crossed(LIGHTNING, (1,), VALIDATED[:2], ["accumulated", "manual", "stream"])
    yield from crossed(LIGHTNING, (1, 2), [*SAVED, "resumed"])
    yield from crossed(LIGHTNING, (1,), SAVED[:2], ["accumulated", "EMA"])
    yield from crossed(LIGHTNING, (1,), ["checkpoint when it ends by an exception"], ["raises"])
    # Callbacks and options.
    yield from crossed(LIGHTNING, (1,), ["log"], [*CALLBACKS, *LOGGERS])
    yield from crossed(LIGHTNING, (2,), ["log"], ["early stopping", "SWA", "throughput"])
    yield from crossed(LIGHTNING, (1,), ["accumulated", "clipped", *OPTIONS])
    yield from crossed(
        LIGHTNING,
        (2,),
        ["accumulated", "clipped", "bf16", "two epochs", "fast_dev_run"],
        ["log sync_dist"],
    )
    yield from crossed(LIGHTNING, (1,), PROFILERS, ["", "validated"])
    yield from crossed(LIGHTNING, (2,), ["simple profiler"])
    # Modules, models and batches.
    yield from crossed(LIGHTNING, (1,), [*MODULES, *DATA, "global module hooks"])
    yield from crossed(
        LIGHTNING,
        (2,),
        ["overrides", "looks at the strategy", "returns a dict", *DATA[2:]],
        ["log"],
    )
    yield from crossed(LIGHTNING, (2,), ["unused parameters"], ["manual"], ["log"])
    yield from crossed(
        LIGHTNING,
        (1,),
        ["cond", "scan", "map", "while_loop", "recomputed", "attention", "LSTM", "parametrized"],
    )
    outputs = [
        "output opaque object",
        "output generator",
        "output dict subclass",
        "output list that holds itself",
    ]
    yield from crossed(LIGHTNING, (1,), outputs)
    not_moved = {"batch recursive", "batch opaque", "batch lazy", "batch meta"}
    yield from crossed(LIGHTNING, (1,), [name for name in BATCHES if name not in not_moved])
    # Endings and stages.
    yield from crossed(LIGHTNING, (1,), [name for name in ENDINGS if name != "left early"])
    yield from crossed(LIGHTNING, (2,), ["should_stop", "StopIteration"], ["log"])
    yield from crossed(LIGHTNING, (1,), STAGES, **EVERY_STAGE)
    yield from crossed(LIGHTNING, (2,), ["all stages"], **EVERY_STAGE)
    yield from crossed(LIGHTNING, (1, 2), ["two monitors"], ["log"])
    # Strategies; and four ranks.
    yield from crossed(LIGHTNING, (1, 2), ["own strategy"], ["log sync_dist"])
    yield from crossed(LIGHTNING, (2,), ["FSDP2", "tensor parallel"], ["", "log sync_dist"])
    yield from crossed(LIGHTNING, (2,), ["static graph", "unused parameters"])
    yield from crossed(LIGHTNING, (4,), ["log", "log sync_dist", "validated"])
    # The default settings of the monitor.
    yield from crossed(LIGHTNING, (1, 2), ["", "log", "validated", "two epochs"], **TRACED)
    yield from crossed(
        LIGHTNING,
        (1,),
        ["accumulated", "manual", "tensorboard", "torch profiler", "raises", "compiled", "SWA"],
        **TRACED,
    )


def _transformers() -> Iterator[Case]:
    yield from crossed(TRANSFORMERS, (1,), LOGGED, ["", "evaluated"])
    yield from crossed(
        TRANSFORMERS,
        (1,),
        [
            *EVALUATED,
            *SAVES,
            *ARGUMENTS,
            *LANGUAGE,
            "accumulated",
            "SGD",
            "Adafactor",
            "stream",
            "workers",
        ],
    )
    yield from crossed(
        TRANSFORMERS,
        (1,),
        ["own loss", "raises", "KeyboardInterrupt", "decides itself", "trained twice"],
    )
    yield from crossed(
        TRANSFORMERS, (1,), ["evaluates and predicts", "tensorboard", "two monitors", "compiled"]
    )
    yield from crossed(
        TRANSFORMERS,
        (2,),
        ["", "evaluated", "accumulated", "the best is loaded", "logs each step", "logs nothing"],
    )
    yield from crossed(TRANSFORMERS, (4,), [""])
    yield from crossed(TRANSFORMERS, (1, 2), ["", "evaluated"], **TRACED)


def _engines() -> Iterator[Case]:
    engines = [
        "",
        "accumulated",
        "clipped",
        "scheduled",
        "validated",
        "global module hooks",
        "raises",
        "batch dict",
        "cond",
        "output None",
    ]
    yield from crossed(ACCELERATE, (1,), engines)
    yield from crossed(FABRIC, (1,), [*engines, "autocast"])
    yield from crossed(ACCELERATE, (2,), ["", "accumulated", "clipped", "gathered losses"])
    yield from crossed(FABRIC, (2,), ["", "clipped", "gathered losses"])
    yield from crossed(ACCELERATE, (4,), [""])
    yield from crossed(FABRIC, (4,), [""])


CASES = {case.name: case for case in (*_loops(), *_lightning(), *_transformers(), *_engines())}
"""All cases, by name."""

AXES: dict[str, frozenset[str]] = {
    "what is logged, and where": frozenset({*LOGS, *MORE_LOGS, *PLACES, *LOGGED, *LOGGERS}),
    "validation": frozenset({*VALIDATED, *EVALUATED}),
    "checkpoints": frozenset({*SAVED, *SAVES, "checkpoint when it ends by an exception"}),
    "callbacks": frozenset({*CALLBACKS, "own loss", "decides itself"}),
    "options": frozenset({*OPTIONS, *SETTINGS, *ARGUMENTS}),
    "steps and optimizers": frozenset({*STEPS, *MODULES, *OPTIMIZERS, "no_sync"}),
    "data": frozenset(DATA),
    "models": frozenset({*MODELS, *LANGUAGE, *COMPILED, *ON_THE_WAY}),
    "outputs of modules": frozenset(OUTPUTS),
    "batches": frozenset(BATCHES),
    "the user's hooks and modes": frozenset(HOOKS),
    "endings": frozenset(ENDINGS),
    "several stages, fits, monitors": frozenset(
        {
            *STAGES,
            "stages",
            "two monitors",
            "watched twice",
            "trained twice",
            "evaluates and predicts",
        }
    ),
    "strategies and shards": frozenset(STRATEGIES),
    "profilers": frozenset({*PROFILERS, "trace"}),
}
"""Groups of traits, for a summary. A case can belong to several groups."""
