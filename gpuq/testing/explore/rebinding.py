"""The product's own functions over other operations, and with single faults put in.

Every function of the protocol is rebuilt from its own code object with other globals: the same
byte code, in which `load_acquire` and its kind, libc and the driver are the models'. Nothing of
the product is changed, and no compiler is needed.
"""

from __future__ import annotations

import inspect
import textwrap
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gpuq import compiling, ordering
from gpuq.host import (
    admission,
    arrival,
    completion,
    copier,
    copying,
    direct_file,
    issuing,
    poller,
    reader,
    records,
    service,
    staging,
    tables,
    threads,
    tracing,
    uring,
)
from gpuq.kernels import counters, queue

MODULES = (
    queue,
    counters,
    records,
    admission,
    issuing,
    arrival,
    copying,
    completion,
    tracing,
    poller,
    staging,
    tables,
    threads,
    copier,
    reader,
    direct_file,
    service,
    uring,
)
"""What is rebuilt; other modules are used as they are."""


class MutationError(Exception):
    """A mutant does not fit the product's source any more."""


@dataclass(frozen=True)
class Edit:
    """One change of a function's source.

    Attributes
    ----------
    function : str
        ``module.name``, such as ``queue.publish``; a method's is ``module.Class.name``.
    old, new : str
        The text that is replaced; it stands there once. Indentation counts from the function's.
    """

    function: str
    old: str
    new: str


class Rebuilt:
    """A rebuilt module: its globals, as attributes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__ = values

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Code:
    """The rebuilt modules, each a namespace: ``code.queue.post``, ``code.poller.serve``, ….

    Parameters
    ----------
    replacements : dict
        What stands for the operations and system calls, by name.
    edits : iterable of Edit
    constants : dict
        ``module.NAME``: another value for a constant, such as how often a spin looks.
    """

    def __init__(
        self,
        replacements: dict[str, Any],
        edits: Iterable[Edit] = (),
        constants: dict[str, Any] | None = None,
    ) -> None:
        self._globals = {module.__name__: dict(vars(module)) for module in MODULES}
        self._rebuilt: dict[int, Any] = {}
        self._edits: dict[str, list[Edit]] = {}
        for edit in edits:
            self._edits.setdefault(edit.function, []).append(edit)
        edited = {function.partition(".")[0] for function in self._edits}
        self._replace(replacements)
        for module in MODULES:
            rebuilt = Rebuilt(self._globals[module.__name__])
            self._rebuilt[id(module)] = rebuilt
            setattr(self, module.__name__.rpartition(".")[2], rebuilt)
        for values in self._globals.values():
            for key, value in list(values.items()):
                values[key] = self._rebuild(value)
            # An edit may use an operation that the module does not.
            for operation in ordering.OPERATIONS:
                values.setdefault(operation.__name__, replacements[operation.__name__])
        if edited:
            # Nor does the module import what only its mutant uses.
            everything = {k: v for values in self._globals.values() for k, v in values.items()}
            for name in edited:
                values = next(v for k, v in self._globals.items() if k.endswith(f".{name}"))
                for key, value in everything.items():
                    values.setdefault(key, value)
        for name, value in (constants or {}).items():
            short, _, constant = name.rpartition(".")
            values = next(v for k, v in self._globals.items() if k.endswith(f".{short}"))
            if constant not in values:
                raise MutationError(f"{name} is gone")
            values[constant] = value
        if self._edits:
            raise MutationError(f"no such function: {', '.join(self._edits)}")

    def __getattr__(self, module: str) -> Any:
        raise AttributeError(module)

    def _replace(self, replacements: dict[str, Any]) -> None:
        for values in self._globals.values():
            for name, stand_in in replacements.items():
                if name in values:
                    self._rebuilt[id(values[name])] = stand_in

    def _rebuild(self, value: Any) -> Any:
        """Return the rebuilt form of a function or class of the product; other things as is."""
        known = self._rebuilt.get(id(value))
        if known is not None:
            return known
        made = value
        if isinstance(value, types.FunctionType):
            if value in compiling._contracts:
                made = self._dispatcher(value)
            elif value.__module__ in self._globals:
                made = self._function(value, value.__qualname__)
        elif hasattr(value, "py_func"):
            return self._rebuild(value.py_func)
        elif isinstance(value, type) and value.__module__ in self._globals:
            made = self._class(value)
        self._rebuilt[id(value)] = made
        return made

    def _function(self, function: Any, name: str) -> Any:
        code, defaults = function.__code__, function.__defaults__
        edits = self._edits.pop(f"{function.__module__.rpartition('.')[2]}.{name}", None)
        if edits:
            code = _edited(function, edits)
        made = types.FunctionType(
            code, self._globals[function.__module__], name, defaults, function.__closure__
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made

    def _dispatcher(self, declared: Callable[..., Any]) -> Callable[..., Any]:
        """Dispatch to rebuilt implementations; models bring methods of the same name."""

        class Implementations(dict[type, Callable[..., Any]]):
            def __missing__(self, owner: type) -> Callable[..., Any]:
                self[owner] = getattr(owner, declared.__name__)
                return self[owner]

        implementations = Implementations()

        def dispatch(first: Any, *rest: Any) -> Any:
            return implementations[type(first)](first, *rest)

        for owner, function in compiling._contracts[declared].implementations.items():
            implementations[owner] = self._rebuild(function)
        return dispatch

    def _class(self, owner: type) -> type:
        if issubclass(owner, (tuple, Enum, BaseException)):
            return owner
        members = {}
        for name, value in vars(owner).items():
            if isinstance(value, types.FunctionType):
                value = self._function(value, f"{owner.__name__}.{name}")
            elif isinstance(value, property) and value.fget is not None:
                value = property(self._function(value.fget, f"{owner.__name__}.{name}"))
            elif name in ("__dict__", "__weakref__"):
                continue
            members[name] = value
        return type(owner.__name__, owner.__bases__, members)


def _edited(function: Any, edits: list[Edit]) -> types.CodeType:
    """Compile a function's source with its edits."""
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :] if not source.startswith("def ") else source
    for edit in edits:
        if source.count(edit.old) != 1:
            raise MutationError(
                f"{edit.function} has {edit.old!r} {source.count(edit.old)} times, not once"
            )
        source = source.replace(edit.old, edit.new)
    namespace: dict[str, Any] = {}
    source = f"from __future__ import annotations\n{source}"
    exec(compile(source, f"<{edits[0].function}, edited>", "exec"), namespace)
    code: types.CodeType = namespace[function.__name__].__code__
    if code.co_freevars:
        raise MutationError(f"{edits[0].function} has a closure")
    return code
