"""Check a body before it runs, and refuse what no exercise needs.

An exercise is a few lines of tensors and messages. It needs no files, processes or internals of modules. So a
body may use its own names, those of its function and script, harmless builtins, and functions of a few
modules, written as `module.function`. What the chapter's own body of the exercise uses is always allowed.

This is one of the defences that README.md lists, and the only cheap one. It checks names, not behaviour.
"""

import ast
import builtins
import importlib
import re
import sys
import types
from collections.abc import Iterator

STANDARD = {  # allowed names of Python's own modules; of the others whatever reads like arithmetic
    "functools": {"cache", "cmp_to_key", "lru_cache", "partial", "reduce"},
    "collections": {"ChainMap", "Counter", "OrderedDict", "defaultdict", "deque"},
    "contextlib": {"ExitStack", "contextmanager", "nullcontext"},
    "dataclasses": {"field", "replace"},
    "copy": {"copy", "deepcopy"},
    "typing": {
        *("Any", "Callable", "Iterable", "Iterator", "Literal", "Mapping", "NamedTuple", "Optional", "Sequence", "cast")
    },
}
MODULES = {  # whose functions a body may call
    *("math", "itertools", "operator", "collections.abc", *STANDARD),
    *("torch", "torch.nn", "torch.nn.functional", "torch.nn.init", "torch.linalg", "torch.autograd"),
    *("torch.autograd.graph", "torch.cuda", "torch.distributed", "torch.distributed.nn", "torch.utils.checkpoint"),
    *("torch.special", "torch.profiler", "torch.amp", "triton", "triton.language", "triton.language.math"),
}
NOT_OF_TORCH = {  # they read or write files, load code, or change what other code does
    *("load", "save", "from_file", "ops", "classes", "compile", "script", "import_ir_module", "FileStore", "TCPStore"),
    *("HashStore", "PrefixStore", "export", "use_deterministic_algorithms", "profile", "monitored_barrier"),
    *("init_process_group", "destroy_process_group", "attrgetter", "methodcaller"),
    *("inline_asm_elementwise", "call_extern", "extern_elementwise", "autotune", "heuristics"),  # of Triton
    *("CUDAPluggableAllocator", "change_current_allocator", "ExecutionTraceObserver", "tensorboard_trace_handler"),
    *("fork", "wait", "parse_ir", "parse_schema", "boolean_dispatch", "handle_torch_function", "TorchDispatchMode"),
    *("get_file_path", "prepare_multiprocessing_environment", "register_optimizer_step_post_hook", "breakpoint"),
}
CLASSES_OF_TORCH = {  # the others read files, hold programs, or are of no use here
    *("Tensor", "Size", "Generator", "device", "dtype", "finfo", "iinfo", "Event", "Stream", "autocast"),
    *("no_grad", "enable_grad", "inference_mode", "set_grad_enabled"),
}
BUILTINS = {
    *("abs", "all", "any", "bool", "bytes", "callable", "complex", "dict", "divmod", "enumerate", "filter", "float"),
    *("frozenset", "hash", "id", "int", "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min", "next"),
    *("NotImplemented", "object", "pow", "print", "property", "range", "repr", "reversed", "round", "set", "slice"),
    *("sorted", "staticmethod", "str", "sum", "super", "tuple", "zip", "Ellipsis", "hasattr"),
    *(name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)),
}
TRITON = {"tl": "triton.language", "triton": "triton"}  # chapter 09's, from a neighbour file
MODULE_NAMES = {"torch", "dist", "nn", "F", "mp", *TRITON, *sys.stdlib_module_names}  # not from neighbours
LEADS_OUT = {  # to files, memory, "{0.__dict__}"
    *("from_file", "tofile", "dump", "dumps", "ctypes", "format", "format_map")
}
FRAMES = ("gi_", "cr_", "ag_", "tb_", "f_globals", "f_locals", "f_back", "f_builtins")  # others' variables


def objections(body: list[ast.stmt], own: list[ast.stmt], script: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, why) for each thing in `body` that is refused. `own` is the chapter's body, `script` the chapter's file.

    Lines count from the first of the body; the statements come from `fences.parse`.
    """
    allowed = {words for statement in own for node in ast.walk(statement) for words in _uses(node)}
    allowed |= {f".{n.attr}" for n in ast.walk(script) if isinstance(n, ast.Attribute) and n.attr[:2] != "__"}
    imported = _imports(script)
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imported |= _imports(node)
    globals_ = {name for s in script.body for name in _bound(s)}
    neighbours = {a.asname or a.name for s in script.body if isinstance(s, ast.Import) for a in s.names} - set(imported)
    bound = [(node, name) for s in body for node in ast.walk(s) for name in _bound(node)]
    aliases = {name for node, name in bound if _root(getattr(node, "value", None)) in globals_ | set(imported)}
    own_names = {name for _, name in bound} - aliases  # `layer = nn.Linear` defines no new name
    foreign = (globals_ | set(imported)) - own_names | aliases
    inside_chain = set()  # names before a dot, which `_attribute` checks
    for statement in body:
        for node in ast.walk(statement):
            line = getattr(node, "lineno", 2) - 1  # of the wrapped text, see fences.parse
            if isinstance(node, ast.Attribute):
                inside_chain.add(id(node.value))
                module_of_neighbour = ast.unparse(node.value) in neighbours and node.attr in MODULE_NAMES
                if module_of_neighbour and ast.unparse(node) not in allowed:
                    yield line, f"an exercise may not use {ast.unparse(node)}"
            for words, why in _refused(node, imported, globals_, foreign, inside_chain):
                if words not in allowed:
                    yield line, f"{why} {words}"


CUDA_WORDS = {
    *("auto", "bool", "break", "const", "constexpr", "continue", "do", "double", "else", "false", "float", "for", "if"),
    *("int", "true", "unsigned", "while", "fmaf", "max", "min", "x", "y", "z", "__syncthreads", "__syncwarp"),
    *("threadIdx", "blockIdx", "blockDim", "gridDim", "__shared__"),
}
CUDA_CALLS = {"for", "if", "while", "fmaf", "max", "min", "float", "int", "__syncthreads", "__syncwarp"}


def objections_to_cuda(body: str, own: str, script: str) -> Iterator[tuple[int, str]]:
    """(line, why), as `objections`, for lines of a kernel. On a CPU they are a C++ program with full rights.

    A body may use words of the language, names that the file's kernels use, and variables that it declares itself; it
    may call what the chapter's own body calls. No preprocessor, no strings, no scopes, no functions of its own.
    """
    begin, end = re.search(r"__(global|device)__", script), script.rindex("--- end exercise ---")
    kernels = script[begin.start() if begin else 0 : end]  # without includes and the host's part
    kernels = re.sub(r"//[^\n]*", "", kernels)
    words = CUDA_WORDS | set(re.findall(r"\b[a-zA-Z_]\w*", kernels))
    words |= set(re.findall(r"\b(?:auto|bool|double|float|int|unsigned)\s+([a-zA-Z_]\w*)", body))
    words |= set(re.findall(r"\b([a-zA-Z_]\w*)\s*=[^=]", body))  # int i = 0, j = 1
    calls = CUDA_CALLS | set(re.findall(r"\b([a-zA-Z_]\w*)\s*\(", own))
    text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), body, flags=re.DOTALL)
    for number, line in enumerate(text.splitlines(), 1):
        line = re.sub(r"//.*", "", line)
        for sign in re.findall(r"[#\"'\\@$`]|::|->|\]\s*\(|\)\s*\(|\*\s*\)", line):
            yield number, f"an exercise may not use {sign!r} in a kernel"
        for name in re.findall(r"(?<![\w.])[a-zA-Z_]\w*", re.sub(r"\b\d[\w.]*", "", line)):
            if name not in words:
                yield number, f"an exercise may not use {name!r}: it is no name of the kernels, nor a variable of yours"
        for name in re.findall(r"\b([a-zA-Z_]\w*)\s*\(", line):
            if name not in calls:
                yield number, f"an exercise may not call {name!r} in a kernel"


def _refused(
    node: ast.AST, imported: dict[str, str], globals_: set[str], foreign: set[str], inside_chain: set[int]
) -> Iterator[tuple[str, str]]:
    """(what is used, what is wrong with it)"""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        for path in _imports(node).values():
            if not _may_import(path):
                yield path, "an exercise may not import"
    elif isinstance(node, ast.Name):
        path = imported.get(node.id, "")
        builtin = node.id in vars(builtins) and node.id not in BUILTINS | globals_  # even if it is local
        if path and isinstance(_resolve(path), types.ModuleType):
            if id(node) not in inside_chain:
                yield node.id, "a module may only stand before a dot:"
        elif (path and not _may_import(path)) or builtin or node.id.startswith("__"):
            yield node.id, "an exercise may not use"
    elif isinstance(node, ast.MatchClass):
        yield from ((f".{name}", "an exercise may not use") for name in node.kwd_attrs if _insides(name))
    elif isinstance(node, ast.Attribute):
        yield from _attribute(node, imported, foreign)
        if _module_of(node, imported) is not None and id(node) not in inside_chain:
            yield ast.unparse(node), "a module may only stand before a dot:"
    elif isinstance(node, (ast.Global, ast.ClassDef)):
        yield type(node).__name__, "an exercise may not contain a statement of kind"
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("__"):
        yield node.name, "an exercise may not define"


def _insides(attribute: str) -> bool:
    """Is this an attribute of other objects' internals?"""
    return attribute.startswith(("_", *FRAMES)) or attribute in LEADS_OUT


def _root(node: ast.AST | None) -> str:
    """The name that a.b[c].d begins with, "" if that is no name."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _attribute(node: ast.Attribute, imported: dict[str, str], foreign: set[str]) -> Iterator[tuple[str, str]]:
    if _insides(node.attr):
        yield f".{node.attr}", "an exercise may not use"
    if isinstance(node.ctx, (ast.Store, ast.Del)):
        name = _root(node.value)
        if not name or name in foreign:
            yield f"{ast.unparse(node)} =", "an exercise may only change its own objects, not"
        kinds = [_resolve(path) for path in ("torch.Tensor", "torch.nn.Module", "torch.autograd.Function")]
        if any(callable(getattr(kind, node.attr, None)) for kind in kinds) and node.attr not in ("grad", "data"):
            yield f".{node.attr} =", "an exercise may not replace a method:"
    module = _module_of(node.value, imported)  # also of torch.nn.functional.linear: each step is checked
    if module is not None and not _may_use(module, node.attr):
        yield ast.unparse(node), "an exercise may not use"


def _may_use(module: types.ModuleType, name: str) -> bool:
    value = getattr(module, name, None) or _resolve(f"{module.__name__}.{name}")  # not yet imported
    if isinstance(value, types.ModuleType):
        return value.__name__ in MODULES
    home = getattr(value, "__module__", None) or module.__name__
    if home in STANDARD and home != module.__name__:  # `torch.utils.checkpoint` re-exports `typing`
        return name in STANDARD[home]
    if module is sys.modules.get("torch") and isinstance(value, type) and name not in CLASSES_OF_TORCH:
        return False
    return (
        module.__name__ in MODULES
        and name in STANDARD.get(module.__name__, {name})
        and name not in NOT_OF_TORCH
        and not name.startswith(("_", "set_"))
        and "object" not in name  # collectives of objects unpickle what they receive
    ) or name == "set_grad_enabled"


def _may_import(path: str) -> bool:
    value, (module, _, name) = _resolve(path), path.rpartition(".")
    if isinstance(value, types.ModuleType):
        return value.__name__ in MODULES
    parent = _resolve(module)
    return isinstance(parent, types.ModuleType) and _may_use(parent, name)


def _module_of(node: ast.expr, imported: dict[str, str]) -> types.ModuleType | None:
    value: object = None
    if isinstance(node, ast.Name) and node.id in imported:
        value = _resolve(imported[node.id])
    elif isinstance(node, ast.Attribute) and (parent := _module_of(node.value, imported)):
        value = getattr(parent, node.attr, None)
    return value if isinstance(value, types.ModuleType) else None


def _resolve(path: str) -> object:
    """The module or module member of this name; None if not installed, like the script's neighbour files.

    Only torch, Triton and the standard library are ever imported here.
    """
    top = path.partition(".")[0]
    if top not in ("torch", "triton") and top not in sys.stdlib_module_names:
        return None
    try:
        return importlib.import_module(path)
    except ImportError:
        module, _, name = path.rpartition(".")
        return getattr(_resolve(module), name, None) if module else None


def _imports(tree: ast.AST) -> dict[str, str]:
    """Name -> dotted path, for the import statements at the top level of a module, or for one such statement.

    Neighbours of the script (`from llama import Llama`) are the chapter's own and not listed, but for Triton's names.
    """
    names: dict[str, str] = {}
    for node in tree.body if isinstance(tree, ast.Module) else [tree]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                path = TRITON.get(alias.name) if node.module == "_interpreter" else None
                names[alias.asname or alias.name] = path or f"{node.module or ''}.{alias.name}"
    if isinstance(tree, ast.Module):
        names = {n: p for n, p in names.items() if p.partition(".")[0] in {"torch", "triton", *sys.stdlib_module_names}}
    return names


def _bound(node: ast.AST) -> list[str]:
    """Names that a statement of a module, or a node in a body, gives a value to."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    return []


def _uses(node: ast.AST) -> Iterator[str]:
    """The name that `_refused` gives to what this node of the chapter's own body uses."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield from (f".{node.attr}", ast.unparse(node), f"{ast.unparse(node)} =", f".{node.attr} =")
    elif isinstance(node, (ast.Global, ast.ClassDef)):
        yield type(node).__name__
    elif isinstance(node, ast.FunctionDef):
        yield node.name
