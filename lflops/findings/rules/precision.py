"""Rules about a wider dtype than necessary."""

from collections.abc import Iterable, Iterator, Sequence

from lflops.analysis.tree import total_seconds
from lflops.findings.evidence import StepEvidence
from lflops.findings.repeats import modules_in_double_precision, modules_multiplying_in
from lflops.findings.rule import Candidate, Facts, ModuleRule, StepRule, Threshold, others_like
from lflops.hardware.chips import vendor_of
from lflops.hardware.peaks import peak_of
from lflops.profile.module_names import ancestry
from lflops.profile.series import grouped

FASTER_DTYPES = {"float32": "tf32", "tf32": "bfloat16"}
"""For each dtype, the next faster dtype of NVIDIA's tensor cores."""

FLOAT32_HALVES_FLOAT64 = 0.5
"""Float32 saves at least this share of the time that large operators take in float64."""


class WideDtype(ModuleRule):
    """A module, or the whole model, runs matmuls in a wider dtype than necessary.

    A repeated module is compared with the other repeats: for example, a block is compared with the
    other blocks. Modules without repeats, and the whole model, are reported only for float64,
    because float32 saves at least half of their time.
    """

    name = "dtype"
    threshold = Threshold(share=0.0)
    is_lower_bound = True
    sentence = (
        "The matmuls of {where} run in {dtype}, while {others} use {usual_dtype}: this costs "
        "{cost}."
    )
    fix = "Cast the parameters, buffers and inputs of {where} to {usual_dtype}"
    right = (15, 15)

    sentence_of_single_module = (
        "The matmuls of {where} run in {dtype}, while the model trains in {usual_dtype}: this "
        "costs at least {cost}."
    )
    sentence_of_model = "The matmuls of the model run in {dtype}: this costs at least {cost}."
    fix_of_model = (
        "Train in {usual_dtype} unless you need {dtype}: call model.to(torch.{usual_dtype}), and "
        "convert the batch as well"
    )

    def detect_modules(
        self, step: StepEvidence, earlier: Sequence[Candidate]
    ) -> Iterable[Candidate]:
        yield from self._repeats(step)
        yield from self._single_modules(step)
        yield from self._model(step)

    def _repeats(self, step: StepEvidence) -> Iterator[Candidate]:
        for repeat in step.unlike_repeats:
            if repeat.has_wider_dtype:
                facts: Facts = {
                    "dtype": _public_name(repeat.dtype),
                    "usual_dtype": _public_name(repeat.usual_dtype),
                    "others": others_like(repeat.others),
                }
                yield Candidate(
                    rule=self, seconds=repeat.excess_seconds, module=repeat.module, facts=facts
                )

    def _single_modules(self, step: StepEvidence) -> Iterator[Candidate]:
        usual_dtype = step.profile.run.dtype
        if usual_dtype is None or usual_dtype == "float64":
            return
        repeats = {repeat.module for repeat in step.unlike_repeats}
        names = []
        for name in modules_multiplying_in(step.profile, "float64"):
            if repeats.isdisjoint(ancestry(name)):
                names.append(name)
        facts: Facts = {"dtype": "float64", "usual_dtype": _public_name(usual_dtype)}
        for module, saved in _saved_in_float32(names, step):
            yield Candidate(rule=self, seconds=saved, module=module, facts=facts)

    def _model(self, step: StepEvidence) -> Iterator[Candidate]:
        seconds = total_seconds(step.root)
        if step.profile.run.dtype == "float64" and seconds is not None:
            facts: Facts = {"dtype": "float64", "usual_dtype": "float32"}
            yield Candidate(rule=self, seconds=seconds * FLOAT32_HALVES_FLOAT64, facts=facts)

    def title_for(self, candidate: Candidate) -> str:
        return "matmuls of {where} in {dtype}" if candidate.module else "matmuls in {dtype}"

    def sentence_for(self, candidate: Candidate, step: StepEvidence) -> str:
        if "others" in candidate.facts:
            return self.sentence
        return self.sentence_of_single_module if candidate.module else self.sentence_of_model

    def fix_for(self, candidate: Candidate, step: StepEvidence) -> str:
        is_model = "others" not in candidate.facts and not candidate.module
        return self.fix_of_model if is_model else self.fix


class DoublePrecision(ModuleRule):
    """A module computes in float64, although it runs no matmuls in float64.

    lflops reports this if the model trains in another dtype, and if large operators with a float64
    or complex128 result move at least half of the module's bytes. A common cause is a constant
    that was made with NumPy, such as a window or a weight of the loss.
    """

    name = "double_precision"
    threshold = Threshold(share=0.05)
    is_lower_bound = True
    title = "operators of {where} in float64"
    sentence = (
        "The operators of {where} run in float64, while the model trains in {usual_dtype}: this "
        "costs at least {cost}."
    )
    fix = "Cast the constants, buffers and inputs of {where} to {usual_dtype}"

    def detect_modules(
        self, step: StepEvidence, earlier: Sequence[Candidate]
    ) -> Iterable[Candidate]:
        usual_dtype = step.profile.run.dtype
        if usual_dtype is None or usual_dtype == "float64":
            return
        multiplying = modules_multiplying_in(step.profile, "float64")
        names = set(modules_in_double_precision(step.profile)).difference(multiplying)
        facts: Facts = {"usual_dtype": _public_name(usual_dtype)}
        for module, saved in _saved_in_float32(sorted(names), step):
            yield Candidate(rule=self, seconds=saved, module=module, facts=facts)


def _saved_in_float32(names: Iterable[str], step: StepEvidence) -> Iterator[tuple[str, float]]:
    """Yield modules that compute in float64, and the seconds that they would save in float32.

    Modules with the same pattern are one item. Modules without a known time are left out.
    """
    seconds_of: dict[str, float] = {}
    for name in names:
        seconds = total_seconds(step.profile.modules[name], own=True)
        if seconds is not None:
            seconds_of[name] = seconds
    for module, members in _by_pattern(seconds_of, step).items():
        yield module, sum(seconds_of[name] for name in members) * FLOAT32_HALVES_FLOAT64


def _by_pattern(names: Iterable[str], step: StepEvidence) -> dict[str, list[str]]:
    """Group modules by their pattern, such as `blocks.*.attn`.

    If `names` has only some of the modules with a pattern, each of them is a group of its own. The
    key of such a group is the name of the module.
    """
    groups: dict[str, list[str]] = {}
    for pattern, members in grouped(names, lambda name: step.patterns.get(name, name)).items():
        if len(members) == len(step.modules_at(pattern)):
            groups[pattern] = members
        else:
            for name in members:
                groups[name] = [name]
    return groups


def _public_name(dtype: str) -> str:
    """Return the dtype of the tensors that a matmul in `dtype` multiplies.

    For TF32 this is float32, because TF32 is only a precision of matmuls.
    """
    return "float32" if dtype == "tf32" else dtype


class UnusedTensorCores(StepRule):
    """The model runs matmuls in a dtype, although the chip is faster in a narrower dtype.

    On NVIDIA GPUs, float32 is compared with TF32, and TF32 with bfloat16. The saving is computed
    from the peaks of the chip and the ideal time of the matmuls.
    """

    name = "tensor_cores"
    threshold = Threshold(share=0.10)
    sentence = (
        "The matmuls of the model run in {dtype}. According to the chip's peaks, {faster} would "
        "save {cost}."
    )
    fix = (
        "Train in bfloat16, for example with torch.autocast. To keep float32, allow TF32: "
        "torch.set_float32_matmul_precision('high')"
    )

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        run = step.profile.run
        chip = run.hardware
        if step.breakdown is None or chip is None or vendor_of(chip.name) != "NVIDIA":
            return
        faster = FASTER_DTYPES.get(run.dtype or "")
        faster_peak = peak_of(faster, chip)
        if not faster_peak:
            return
        peak = peak_of(run.dtype, chip) or faster_peak
        matmuls = step.breakdown.parts.get("ideal_compute", 0.0) * step.breakdown.seconds
        facts: Facts = {"dtype": run.dtype, "faster": faster}
        yield Candidate(rule=self, seconds=(1 - peak / faster_peak) * matmuls, facts=facts)
