"""Guard a training run against errors of lflops: the run calls lflops only through this guard.

If lflops fails, it removes everything that it has installed (such as hooks), logs one warning, and
training continues. After an interrupt such as Ctrl-C, lflops also removes everything, and the
interrupt is raised again.

    guard = ErrorGuard(fail)
    hook = guard.guard(listener.enter_module)     # a hook that raises no errors
    with guard:                                   # a block that raises no errors
        session.batch_ends(batch)
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any, Self

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function that wraps an lflops function so that a training run can call it safely."""


def unguarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function unchanged, so that its errors are raised.

    This `Guard` is for functions that users call directly, because users must see the errors.
    """
    return function


class ErrorGuard:
    """Handles the errors of lflops in one training run.

    Attributes:
        passes: Function that returns true if this guard must raise an error in the current thread
            instead of handling it. It returns true while the thread makes calls that lflops had
            postponed, because the code that makes these calls handles their errors.
    """

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        """Create the guard.

        Args:
            fail: Function that is called with each error. It removes everything that lflops has
                installed, and must allow a second call. It raises the error if the training run
                must end.
        """
        self._fail = fail
        # `bool()` returns False: by default, no error passes.
        self.passes: Callable[[], bool] = bool

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `function` that returns `None` instead of raising an error."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                if not self.contains(error):
                    raise
                return None

        return guarded

    def __enter__(self) -> None:
        """Begin a block of lflops code."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """End the block. If the block raised an error, let `contains` handle it."""
        return error is not None and self.contains(error)

    def contains(self, error: BaseException) -> bool:
        """Handle an error by removing everything that lflops has installed.

        Returns whether the error is suppressed. Interrupts are not suppressed. While `passes`
        returns true, no error is handled or suppressed.
        """
        if self.passes():
            return False
        try:
            self._fail(error)
        except BaseException as another:
            if another is not error and not isinstance(another, Exception):
                # The removal itself was interrupted.
                self._fail(another)
            raise
        return isinstance(error, Exception)


class ExitBy:
    """A descriptor that makes `with` call the `__exit__` of an `ExitStack`.

    If a class defined an `__exit__` method, Ctrl-C could interrupt this method before its first
    line, and then nothing would be cleaned up. With the descriptor, the class needs no such method:
    a `with` statement looks up `__exit__` before its block begins, finds the method of the
    `ExitStack`, and calls it directly when the block ends.
    """

    def __init__(self, stack_of: Callable[[Any], contextlib.ExitStack]) -> None:
        """Create the descriptor.

        `stack_of` is called with an instance of the class. It returns the `ExitStack` that cleans
        up the instance.
        """
        self._stack_of = stack_of

    def __get__(self, instance: Any, owner: type) -> Callable[..., bool | None]:
        return self if instance is None else self._stack_of(instance).__exit__

    def __call__(self, instance: Any, *error: Any) -> bool | None:
        """Exit an instance that is passed as the first argument.

        `contextlib.ExitStack` calls `type(instance).__exit__(instance, ...)` in this way.
        """
        return self._stack_of(instance).__exit__(*error)


class CleanupStack:
    """A stack of functions that remove what lflops has installed, such as hooks and wrappers.

    Add each function before you install its hook or wrapper. So the hook is removed even if an
    interrupt arrives right after it was installed. Therefore, a function must do nothing if it is
    called a second time, or if its hook was never installed.
    """

    def __init__(self) -> None:
        self._parts: list[Callable[[], object]] = []

    def add(self, remove: Callable[..., object], *args: Any) -> None:
        """Add a function that `close` calls with the given arguments.

        Call `add` before you install the hook or wrapper that the function removes.
        """
        self._parts.append(partial(remove, *args))

    def enter(self, context: contextlib.AbstractContextManager[Any]) -> None:
        """Enter a context manager, and exit it when the stack is closed."""
        self.add(context.__exit__, None, None, None)
        context.__enter__()

    def close(self) -> None:
        """Call all functions, the last one first. Then raise their first error, if there was one.

        An interrupt is raised rather than an error. A second call of `close` does nothing.
        """
        call_each([self._remove_last] * len(self._parts))

    def __enter__(self) -> Self:
        return self

    def _ends(self) -> contextlib.ExitStack:
        """Return an `ExitStack` that closes this stack. `__exit__` uses it.

        The `ExitStack` calls `close` twice. If an interrupt ends the first call, the second call
        does the rest.
        """
        ends = contextlib.ExitStack()
        ends.callback(self.close)
        ends.callback(self.close)
        return ends

    __exit__ = ExitBy(_ends)

    def _remove_last(self) -> None:
        if not self._parts:
            return
        try:
            self._parts[-1]()
        except Exception:
            self._parts.pop()
            raise
        # An interrupt skips this line, so the function stays on the stack and is called again.
        self._parts.pop()


def call_each(functions: Iterable[Callable[[], object]]) -> None:
    """Call all functions. Then raise the last interrupt or, without an interrupt, the first error.

    A function that is interrupted is called a second time.
    """
    failures: list[BaseException] = []
    for function in functions:
        for _ in range(2):
            try:
                function()
            except Exception as error:  # noqa: BLE001 - it is raised below
                failures.append(error)
            except BaseException as interrupt:  # noqa: BLE001 - it is raised below
                failures.insert(0, interrupt)
                continue
            break
    if failures:
        raise failures[0]


_ABSENT = object()


class _Wrapper:
    """An attribute of one object that replaces a method, to run code around each of its calls.

    A call of the wrapper calls `around` with the original method and the arguments of the call. In
    all other respects, such as comparison and pickling, the wrapper behaves like the method.
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
        self._lflops_found = _ABSENT
        self._lflops_bound = _ABSENT
        self._lflops_ended = False

    @property
    def __wrapped__(self) -> Any:
        """Return the wrapped method: an earlier attribute of the object, or its class's method."""
        if self._lflops_before is not _ABSENT:
            return self._lflops_before
        owner = self._lflops_owner
        kind = type(owner)
        found = getattr(kind, self._lflops_name)
        if found is not self._lflops_found:
            static = inspect.getattr_static(kind, self._lflops_name)
            self._lflops_bound = (
                static.__get__(owner, kind) if hasattr(static, "__get__") else static
            )
            self._lflops_found = found
        return self._lflops_bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # These lines compute `self.__wrapped__`. Reading the property in every step would be slow.
        method = self._lflops_before
        if method is _ABSENT:
            found = getattr(type(self._lflops_owner), self._lflops_name)
            method = self._lflops_bound if found is self._lflops_found else self.__wrapped__
        if self._lflops_ended:
            return method(*args, **kwargs)
        return self._lflops_around(method, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.__wrapped__)

    def __eq__(self, other: object) -> bool:
        if type(other) is _Wrapper:
            other = other.__wrapped__
        return bool(self.__wrapped__ == other)

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.copy, (self.__wrapped__,)


def replace_attribute(undo: CleanupStack, owner: Any, name: str, ours: Any) -> None:
    """Replace an attribute of a class or a module with `ours` until `undo` is closed.

    If other code has replaced the attribute by then, the newer replacement stays.
    """
    undo.add(_restore, owner, name, ours, vars(owner)[name])
    setattr(owner, name, ours)


def _restore(owner: Any, name: str, ours: Any, before: Any) -> None:
    """End the replacement `ours` of an attribute, and restore the value `before`.

    lflops may have replaced the attribute several times, and the replacements may end in any order.
    If a newer replacement is still active, `ours` is only marked as ended, and `before` is restored
    when the newer replacement ends. If `before` is itself a replacement that has already ended, the
    value that it replaced is restored.
    """
    # Other code may copy the mark to another function, for example with `functools.wraps`. A copied
    # mark has no effect, because the mark contains the function to which it belongs.
    ours.lflops_ended = (ours, before)
    while True:
        current = vars(owner).get(name)
        marked, earlier = getattr(current, "lflops_ended", (_ABSENT, None))
        if marked is not current:
            return
        setattr(owner, name, earlier)


def wrap(undo: CleanupStack, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Wrap a method of one object until `undo` is closed.

    Only an attribute of this object is set; its class does not change. If other code has put
    another wrapper around this wrapper by the time `undo` is closed, this wrapper stays in place,
    but does nothing more than call the method.

    Args:
        undo: Stack that removes the wrapper.
        owner: The object.
        name: The name of the method.
        around: Function that is called instead of the method. Its arguments are the method and the
            arguments of the call.
    """
    wrapper = _Wrapper(owner, name, around)
    undo.add(_unwrap, owner, name, wrapper)
    setattr(owner, name, wrapper)


def _unwrap(owner: Any, name: str, wrapper: _Wrapper) -> None:
    """Remove a wrapper, and the wrappers directly below it that have already ended.

    Several wrappers of the same method can end in any order. If a newer wrapper is still active,
    this wrapper is only marked as ended, and is removed together with the newer wrapper.
    """
    wrapper._lflops_ended = True  # noqa: SLF001
    while True:
        top = vars(owner).get(name)
        if type(top) is not _Wrapper or not top._lflops_ended:  # noqa: SLF001
            return
        if top._lflops_before is _ABSENT:  # noqa: SLF001
            delattr(owner, name)
        else:
            setattr(owner, name, top._lflops_before)  # noqa: SLF001
