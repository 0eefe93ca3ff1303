"""Test that reports name the user's function that takes the time, in profiles made by hand."""

from typing import Any

from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.findings.finding import Finding
from lflops.profile.profile import Profile
from lflops.profile.records import MainFunction, Phase
from lflops.profile.steps import Step
from lflops.report.explanation import explain
from lflops.report.first_screen.screen import FirstScreen, first_screen
from lflops.report.first_screen.window import window_summary
from tests.report.test_explanation import trained
from tests.report.test_first_screen import STALLS, ledger, steps


def function(phase: str, module: str = "", *, samples: int = 20) -> MainFunction:
    """Return the function `f` in line 8 of train.py."""
    return MainFunction(
        phase=phase,
        module=module,
        name="f",
        file="train.py",
        line=8,
        samples=samples,
        share=0.9,
    )


def first(given: Profile, *functions: MainFunction) -> Finding:
    """Return the first finding about a profile with these main functions."""
    return explain(replace(given, main_functions=functions)).findings[0]


def test_the_function_of_a_phase_is_named() -> None:
    """The sentence and the place have the function that takes most of the phase."""
    waits = trained(data=20e-3)
    plain = first(waits)
    assert "37.7 % of the step (20.0 ms) is spent waiting for data." == plain.sentence
    assert "" == plain.place
    named = first(waits, function("data"))
    assert "f (train.py:8)" == named.place
    assert (
        "37.7 % of the step (20.0 ms) is spent waiting for data, mostly in f (train.py:8)."
    ) == named.sentence
    assert plain.fix == named.fix


def test_functions_of_other_phases_are_not_named() -> None:
    """A function of another phase, or of a module, says nothing about the data wait."""
    found = first(trained(data=20e-3), function("other"), function("forward", "a"))
    assert "" == found.place


def test_a_user_is_told_to_look_at_the_function() -> None:
    """The general examples of such work, and of what to do, give way to the function."""
    found = first(trained(other=20e-3), function("other"))
    assert (
        "37.7 % of the step (20.0 ms) is spent outside forward, backward and the other phases, "
        "mostly in f (train.py:8)."
    ) == found.sentence
    assert "Do the work of f (train.py:8) less often, or in another process" == found.fix


def test_a_hook_is_named_rather_than_a_function() -> None:
    """A hook of Lightning was timed, so it is known better than the function."""
    given = replace(trained(other=20e-3), hooks={"Saver.on_train_batch_end": 19e-3})
    assert "Saver.on_train_batch_end" == first(given, function("other")).place


def test_a_named_phase_has_its_function() -> None:
    """A phase that the user has named has a function too."""
    found = first(trained(augment=20e-3), function("augment"))
    assert "is spent in the phase augment, mostly in f (train.py:8)." in found.sentence


def outside(**facts: Any) -> Profile:
    """Return a run that spends 8 ms in the model outside its layers."""
    own: dict[tuple[str, Phase], float] = {("", "forward"): 8e-3}
    return trained(own=own, facts=facts)


def test_the_function_outside_the_layers_is_named() -> None:
    """The advice is about this function, not about all code that might take the time."""
    found = first(outside(), function("forward"), function("forward", "a", samples=99))
    assert "outside" == found.cause
    assert (
        "is spent in Net itself, outside its layers, or between the model and backward, mostly in "
        "f (train.py:8)."
    ) in found.sentence
    assert "prints" in found.fix
    assert "out of f (train.py:8)" in found.fix


def sleeping(given: Profile, on_core: float = 26e-3, seconds: float = 34e-3) -> Profile:
    """Return the profile of steps in which the training thread uses the CPU for `on_core`."""
    hooked = Step(
        index=9,
        kind="module_timing",
        seconds=seconds,
        phases={},
        thread_cpu=on_core,
        thread_waited=0.0,
        cpu_user=on_core,
        cpu_system=0.0,
    )
    return replace(given, steps=(*given.steps, hooked, hooked, hooked))


def test_a_function_that_sleeps_is_named_once() -> None:
    """The sleep has most of the time outside the layers, so the function is where it sleeps.

    What is left of this time may be spent in any other function.
    """
    own: dict[tuple[str, Phase], float] = {("", "forward"): 10e-3}
    given = sleeping(trained(own=own))
    found = explain(replace(given, main_functions=(function("forward"),))).findings
    places = {finding.cause: finding.place for finding in found}
    assert "f (train.py:8)" == places["sleep"]
    assert "" == places.get("outside", "")
    (sleep,) = [finding for finding in found if finding.cause == "sleep"]
    assert (
        "mostly in f (train.py:8), while the training thread uses no CPU: it sleeps or waits."
    ) in sleep.sentence
    assert sleep.fix.endswith("access to files or the network in f (train.py:8)")


def test_a_tiny_sleep_hides_no_function() -> None:
    """If the thread sleeps for 0.5 of 30 ms, the function that takes most of the time is awake."""
    own: dict[tuple[str, Phase], float] = {("", "forward"): 30e-3}
    given = sleeping(trained(own=own), on_core=53.5e-3, seconds=54e-3)
    step = analyze(given).evidence
    assert 0 < step.sleeping_in("") < 1e-3
    found = first(given, function("forward"))
    assert "outside" == found.cause
    assert "f (train.py:8)" == found.place


def test_a_short_sleep_is_not_where_the_function_is() -> None:
    """A sleep of 10 of 30 ms outside the layers may be in any function, whatever the rest does."""
    own: dict[tuple[str, Phase], float] = {("", "forward"): 30e-3}
    given = sleeping(trained(own=own), on_core=44e-3, seconds=54e-3)
    found = explain(replace(given, main_functions=(function("forward"),))).findings
    assert {"sleep": ""} == {each.cause: each.place for each in found if each.cause == "sleep"}


def screen(*functions: MainFunction) -> FirstScreen:
    """Return the first screen of a run with regular stalls of 100 ms, without a rhythm in steps."""
    given = trained(data=20e-3)
    window = window_summary(analyze(replace(given, main_functions=functions)))
    waits = [sum(STALLS) / len(STALLS)] * len(STALLS)
    return first_screen(window, ledger(steps(*waits)))


def test_the_first_card_names_the_function() -> None:
    """The title and the sentence about the whole run have the function of the window."""
    assert "Waiting for data" == screen().cards[0].title
    card = screen(function("data")).cards[0]
    assert "Waiting for data in f (train.py:8)" == card.title
    assert (
        "25.0 % of the step (100 ms) is spent waiting for data, mostly in f (train.py:8)."
    ) == card.sentence


def test_a_module_is_named_by_its_pattern() -> None:
    """For repeated modules, the function with the most samples is named."""
    given = trained()
    rows = dict(given.modules)
    for name in ("layers", "layers.0", "layers.1"):
        rows[name] = rows["a"]
    functions = (
        replace(function("forward", "layers.0", samples=5), name="g"),
        function("forward", "layers.1", samples=6),
    )
    step = analyze(replace(given, modules=rows, main_functions=functions)).evidence
    pattern = step.patterns.get("layers.0", "layers.0")
    assert "f (train.py:8)" == step.main_function("forward", "layers.1")
    assert pattern != "layers.0"
    assert "f (train.py:8)" == step.main_function("forward", pattern)
    assert "" == step.main_function("backward", pattern)
