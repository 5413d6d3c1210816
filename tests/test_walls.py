"""The walls of the house, held over the syntax trees: imports go down, torch stays in its rooms, pure rooms are
pure."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "triptych"
FILES = sorted(ROOT.rglob("*.py"))

# From the street down. Rooms of one floor do not import one another.
FLOORS = [
    {"cli", "engine"},
    {"demo", "doctor"},
    {"launch"},
    {"waterfall"},
    {"warm_up"},
    {"client"},
    {"http"},
    {"cluster"},
    {"plan"},
    {"understand", "generate", "converse"},
    {"prompt"},
    {"media"},
    {"transfer"},
    {"models"},
    {"cache"},
    {"zoo"},
    {"metrics"},
    {"core"},
]
FLOOR_OF = {room: depth for depth, rooms in enumerate(FLOORS) for room in rooms}

TORCH_ROOMS = {"models", "transfer", "zoo", "testing"}
TORCH_FILES = {
    "understand/runner.py",
    "understand/sampler.py",
    "understand/grammar.py",
    "understand/pausable.py",
    "understand/encoding.py",
    "understand/core.py",
    "understand/loop.py",
    "cluster/engine_main.py",
    "doctor.py",
}
PURE = ["understand/schedule", "understand/blocks.py", "understand/block_hash.py", "understand/encoder_cache.py"]
PURE += ["understand/sequence.py", "generate/schedule", "core", "cache/lru.py", "media/policy.py", "media/budget.py"]
IMPURE_MODULES = {"time", "socket", "torch", "requests", "httpx", "os", "random", "asyncio", "threading"}


def room_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(path, *, with_type_checking=True):
    """Every module that a file imports, at whatever depth of nesting."""
    tree = ast.parse(path.read_text())
    skipped = set()
    if not with_type_checking:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
                skipped.update(id(inner) for inner in ast.walk(node))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def name(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_go_down(path):
    """A room imports rooms below it, or itself. `testing` may be used by the command line's demo only."""
    room = room_of(path)
    if room in ("testing", "__init__"):
        return
    for module in imported_modules(path):
        if not module.startswith("triptych."):
            continue
        other = module.split(".")[1]
        if other == "testing":
            assert room in ("cli", "demo"), f"{module} is for tests and the demo"
            continue
        assert other == room or FLOOR_OF[other] > FLOOR_OF[room], f"{room} imports {module}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_torch_stays_in_its_rooms(path):
    """Schedulers, ledgers, policy, prompts and the door know no tensor library."""
    rooms_ok = room_of(path) in TORCH_ROOMS or (room_of(path) == "generate" and "schedule" not in path.parts)
    if rooms_ok or name(path) in TORCH_FILES:
        return
    assert "torch" not in {module.split(".")[0] for module in imported_modules(path, with_type_checking=False)}


@pytest.mark.parametrize("path", [f for f in FILES if any(name(f).startswith(p) for p in PURE)], ids=name)
def test_pure_rooms_are_pure(path):
    """No clock, socket, tensor, environment or thread: they are parameters, or not there at all."""
    if name(path) in ("core/clock.py",):
        return
    assert not IMPURE_MODULES & {module.split(".")[0] for module in imported_modules(path)}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_every_file_says_what_it_is_and_fits_a_room(path):
    """A docstring at the top, at most 600 lines, functions of at most 80."""
    text = path.read_text()
    tree = ast.parse(text)
    assert not text.strip() or ast.get_docstring(tree), "no module docstring"
    assert text.count("\n") <= 600
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 80, f"{node.name} is {node.end_lineno - node.lineno} lines long"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_unpickles(path):
    """No pickle, no torch.load, no marshal: not on any wire, not from any file."""
    modules = {module.split(".")[0] for module in imported_modules(path)}
    assert not modules & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr == "load":
            assert getattr(node.value, "id", "") != "torch", "torch.load"
