"""The kernel travels to the server, and traces hold no name that a loop could have changed."""

import ast

import pytest

from nnsweep import kernel, measures


def tree_of(module):
    with open(module.__file__, encoding="utf-8") as stream:
        return ast.parse(stream.read())


def imported(tree):
    """Names of all modules that a file imports, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def is_trace(node):
    """Whether a `with` opens a trace or a session of nnsight."""
    return isinstance(node, ast.With) and any(
        isinstance(item.context_expr, ast.Call)
        and isinstance(item.context_expr.func, ast.Attribute)
        and item.context_expr.func.attr in ("trace", "session", "generate")
        for item in node.items
    )


def functions_with_traces(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(map(is_trace, ast.walk(node))):
            yield node


def stored(node):
    """Every name that is assigned below a node, once an assignment."""
    return [
        name.id
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    ]


def loop_names(node):
    """Every name that a loop or a comprehension binds below a node."""
    loops = (ast.For, ast.comprehension)
    return [
        name for loop in ast.walk(node) if isinstance(loop, loops) for name in stored(loop.target)
    ]


def traced_files(folder):
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in functions_with_traces(tree):
            yield path, function


@pytest.fixture(scope="module")
def traced(repository):
    return list(traced_files(repository / "src" / "nnsweep"))


def test_the_kernel_uses_torch_alone():
    assert set(imported(tree_of(kernel))) == {"torch"}


def test_measures_use_torch_beside_the_standard_library():
    outside = {name.split(".")[0] for name in imported(tree_of(measures))}
    assert outside == {"__future__", "collections", "dataclasses", "math", "torch", "typing"}


def test_there_are_traces_to_check(traced):
    names = {function.name for path, function in traced if path.name == "kernel.py"}
    assert {"trace_start", "trace_run"} <= names


def test_a_function_holds_one_trace(traced):
    for path, function in traced:
        traces = [node for node in ast.walk(function) if is_trace(node)]
        assert len(traces) == 1, f"{path.name}: {function.name}"
        inner = [n for n in ast.walk(function) if isinstance(n, ast.FunctionDef)]
        assert inner == [function], f"{path.name}: {function.name} nests a function"


def test_no_loop_stands_around_a_trace(traced):
    for path, function in traced:
        loops = [n for n in ast.walk(function) if isinstance(n, ast.For | ast.While)]
        around = [loop for loop in loops if any(map(is_trace, ast.walk(loop)))]
        assert not around, f"{path.name}: {function.name}"


def test_a_loop_in_a_trace_reuses_no_name(traced):
    for path, function in traced:
        trace = next(node for node in ast.walk(function) if is_trace(node))
        names = loop_names(trace)
        named = [arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)]
        outside = [name for name in stored(function) if name not in stored(trace)]
        for name in set(names) - {"_"}:
            assert names.count(name) == 1 or _same_loop(trace, name), f"{path.name}: {name}"
            assert name not in named, f"{path.name}: {name} is an argument and a loop variable"
            assert name not in outside, f"{path.name}: {name} is also set outside the trace"


def _same_loop(trace, name):
    """Whether loops that share a name follow each other over the same things."""
    over = [
        ast.dump(loop.iter)
        for loop in ast.walk(trace)
        if isinstance(loop, ast.For | ast.comprehension) and name in stored(loop.target)
    ]
    return len(set(over)) == 1


def test_the_body_of_a_trace_begins_on_its_own_line(traced):
    for path, function in traced:
        trace = next(node for node in ast.walk(function) if is_trace(node))
        assert trace.body[0].lineno > trace.lineno, f"{path.name}: {function.name}"


BROKEN = """
def loops(model, points):
    for layer, position in [(layer, position) for layer, position in points]:
        with model.trace("x"):
            model.layers[layer].output[position] = 0
"""


def test_the_known_broken_shape_is_seen():
    (function,) = functions_with_traces(ast.parse(BROKEN))
    assert any(
        any(map(is_trace, ast.walk(n))) for n in ast.walk(function) if isinstance(n, ast.For)
    )
    assert loop_names(function).count("layer") == 2
