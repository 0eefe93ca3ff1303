"""The boundary between a training and lflops: all that a training calls of ours enters through it.

What fails behind it is taken off and warned of once, and the training goes on. An interrupt, as
Ctrl-C, takes off the same, and goes on.

    boundary = ErrorGuard(fail)
    hook = boundary.guard(listener.enter_module)     # a hook that never raises
    with boundary:                                   # the same for a block
        session.batch_ends(batch)
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any, Self

Guard = Callable[
    [Callable[..., Any]], Callable[..., Any]
    # makes a function of ours one that a training may call
]


def unguarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The guard where lflops was called by its user, who is to see our errors."""
    return function


class ErrorGuard:
    """The way into lflops from one training.

    `fail` takes off all that is ours: it is given what was raised, and may be called again.

    It may raise that to end the training.
    """

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail
        self.passes: Callable[[], bool] = (
            # whether errors in this thread are somebody else's now
            bool
        )

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, from which no error of ours comes out: after one it returns `None`."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                if not self.contains(error):
                    raise
                return None

        return guarded

    def __enter__(self) -> None:
        """Begin a block of ours."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """End it; an error of it goes no further."""
        return error is not None and self.contains(error)

    def contains(self, error: BaseException) -> bool:
        """Take everything off. Returns whether the error ends here: an interrupt goes on."""
        if self.passes():
            return False
        try:
            self._fail(error)
        except BaseException as another:
            if another is not error and not isinstance(another, Exception):
                # an interrupt of the taking off itself
                self._fail(another)
            raise
        return isinstance(error, Exception)


class ExitBy:
    """The `__exit__` of a class, by a stack of Python's own.

    Python asks an object for it before the block begins. What it gets has no line of ours, so that
    an interrupt as it is called is still followed by all that is on the stack. `stack_of` returns
    that of an object of the class.
    """

    def __init__(self, stack_of: Callable[[Any], contextlib.ExitStack]) -> None:
        self._stack_of = stack_of

    def __get__(self, instance: Any, owner: type) -> Callable[..., bool | None]:
        return self if instance is None else self._stack_of(instance).__exit__

    def __call__(self, instance: Any, *error: Any) -> bool | None:
        """As `contextlib.ExitStack` calls the `__exit__` of a class."""
        return self._stack_of(instance).__exit__(*error)


class CleanupStack:
    """What is installed, and how to take it off.

    Each part is noted before it is installed, so that an interrupt between the two loses nothing.
    What takes it off has to do no harm where it is called twice, or where nothing was installed.
    """

    def __init__(self) -> None:
        self._parts: list[Callable[[], object]] = []

    def add(self, take_off: Callable[..., object], *given: Any) -> None:
        """Note what takes a part off, with its arguments. Then install the part."""
        self._parts.append(partial(take_off, *given))

    def enter(self, context: contextlib.AbstractContextManager[Any]) -> None:
        """Enter a context manager, and leave it at the end."""
        self.add(context.__exit__, None, None, None)
        context.__enter__()

    def close(self) -> None:
        """Take off all parts, the last one first, each by itself, and raise what one raised first.

        It can be called again.
        """
        call_each([self._take_off_last] * len(self._parts))

    def __enter__(self) -> Self:
        return self

    def _ends(self) -> contextlib.ExitStack:
        """Takes them off, and once more where that was interrupted."""
        ends = contextlib.ExitStack()
        ends.callback(self.close)
        ends.callback(self.close)
        return ends

    __exit__ = ExitBy(_ends)

    def _take_off_last(self) -> None:
        if self._parts:
            try:
                self._parts[-1]()
            except Exception:
                self._parts.pop()
                raise
            # after an interrupt it stays, to be taken off again
            self._parts.pop()


def call_each(functions: Iterable[Callable[[], object]]) -> None:
    """Call all of them, one that is interrupted twice, and raise at the end what was raised first, an interrupt before all else."""
    failures: list[BaseException] = []
    for function in functions:
        for _ in range(2):
            try:
                function()
            except Exception as error:  # noqa: BLE001 - the others are called first
                failures.append(error)
            except BaseException as interrupt:  # noqa: BLE001 - the same
                failures.insert(0, interrupt)
                continue
            break
    if failures:
        raise failures[0]


_ABSENT = object()


class _Wrapper:
    """Stands in the place of a method, as an attribute of the instance.

    `around` is called with the method and its arguments.
    """

    __slots__ = (
        "_lflops_around",
        "_lflops_before",
        "_lflops_bound",
        "_lflops_ended",
        "_lflops_found",
        "_lflops_name",
        "_lflops_owner",
    )

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._lflops_owner = owner
        self._lflops_name = name
        self._lflops_around = around
        self._lflops_before = vars(owner).get(name, _ABSENT)
        self._lflops_found = self._lflops_bound = _ABSENT
        self._lflops_ended = False

    @property
    def __wrapped__(self) -> Any:
        """The method: what was set on the instance before, else what its class has now, which somebody may have replaced since."""
        if self._lflops_before is not _ABSENT:
            return self._lflops_before
        owner, kind = self._lflops_owner, type(self._lflops_owner)
        found = getattr(kind, self._lflops_name)
        if found is not self._lflops_found:
            static = inspect.getattr_static(kind, self._lflops_name)
            self._lflops_bound = (
                static.__get__(owner, kind) if hasattr(static, "__get__") else static
            )
            self._lflops_found = found
        return self._lflops_bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What `__wrapped__` returns, without a call of it in every step.
        method = self._lflops_before
        if method is _ABSENT:
            found = getattr(type(self._lflops_owner), self._lflops_name)
            method = self._lflops_bound if found is self._lflops_found else self.__wrapped__
        return self._lflops_around(method, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.__wrapped__)

    def __eq__(self, other: object) -> bool:
        return bool(self.__wrapped__ == (other.__wrapped__ if type(other) is _Wrapper else other))

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.copy, (self.__wrapped__,)


def replace_attribute(undo: CleanupStack, owner: Any, name: str, ours: Any) -> None:
    """Put ours in the place of an attribute of a class or a module, until `undo` is closed.

    What somebody else puts there since stays.
    """
    undo.add(_put_back, owner, name, ours, vars(owner)[name])
    setattr(owner, name, ours)


def _put_back(owner: Any, name: str, ours: Any, before: Any) -> None:
    ours.lflops_ended = (
        ours,
        before,
        # what has replaced it since puts that back; a copy of the attribute names another object
    )
    while (ended := getattr(current := vars(owner).get(name), "lflops_ended", None)) and ended[
        0
    ] is current:
        setattr(owner, name, ended[1])


def wrap(undo: CleanupStack, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Wrap a method of one object, until `undo` is closed.

    Nothing but an attribute of this instance is set: no class, no module.
    """
    # `around` is called with the method and what the caller gives. A wrapper that somebody else has
    # wrapped since stays below theirs, and goes on to call the method.
    wrapper = _Wrapper(owner, name, around)
    undo.add(_unwrap, owner, name, wrapper)
    setattr(owner, name, wrapper)


def _unwrap(owner: Any, name: str, wrapper: _Wrapper) -> None:
    """Take a wrapper off, and those below it that have ended before.

    Monitors need not end in reverse order.
    """
    wrapper._lflops_ended = True  # noqa: SLF001 - the two are one
    while type(above := vars(owner).get(name)) is _Wrapper and above._lflops_ended:  # noqa: SLF001
        if above._lflops_before is _ABSENT:  # noqa: SLF001
            delattr(owner, name)
        else:
            setattr(owner, name, above._lflops_before)  # noqa: SLF001
