"""``python -m tests.clusters.build_api``: builds Kubernetes' API server and controllers, once, from Debian's sources.

Debian has Kubernetes 1.20 as a source with all that it needs, and builds only the client from it. The sources, Go 1.19
and etcd are 150 MB; the build takes about 15 minutes of two cores and 2 GB of ``.kubernetes-build``. Exits with 1 and
the reason if something cannot be had.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.clusters.fetch import API
from tests.debian import fetch

FOLDER: Final = API.parent
SOURCES: Final = Path("/etc/apt/sources.list.d/debian.sources")
BUILT: Final = ("kube-apiserver", "kube-controller-manager")
VERSION: Final = "k8s.io/kubernetes/vendor/k8s.io/component-base/version"
MARKED: Final = re.compile(r"^//.*\+k8s:openapi-gen=", re.MULTILINE)
WITHOUT: Final = re.compile("code-generator|sample|test|gengo|kube-openapi/(cmd|pkg/(builder|generators))")


def main() -> None:
    if all((API / program).is_file() for program in BUILT):
        return
    API.mkdir(parents=True, exist_ok=True)
    fetch(("golang-1.19-go", "golang-1.19-src", "etcd-server"), FOLDER / "packages", "Go and etcd")
    shutil.copy(FOLDER / "packages/usr/bin/etcd", API)
    source = unpacked()
    place = FOLDER / "gopath/src/k8s.io/kubernetes"
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.is_symlink():
        place.symlink_to(source)
    go("build", "-o", str(API / "openapi-gen"), "k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen")
    subprocess.run(
        [
            *(API / "openapi-gen", "-O", "zz_generated.openapi", "-p", "k8s.io/kubernetes/pkg/generated/openapi"),
            *("--go-header-file", "hack/boilerplate/boilerplate.generatego.txt", "-r", os.devnull),
            *("-i", ",".join(described(source))),
        ],
        cwd=place,
        env=environment(),
        check=True,
    )
    numbers = f"-X {VERSION}.gitVersion=v1.20.2 -X {VERSION}.gitMajor=1 -X {VERSION}.gitMinor=20"
    for program in BUILT:
        go("build", "-ldflags", f"-s -w {numbers}", "-o", str(API / program), f"k8s.io/kubernetes/cmd/{program}")


def unpacked() -> Path:
    """Fetches the source by apt, with lists of its own."""
    lists, sources = FOLDER / "lists", FOLDER / "sources"
    for each in (lists / "partial", sources, FOLDER / "cache"):
        each.mkdir(parents=True, exist_ok=True)
    text = SOURCES.read_text().replace("Types: deb\n", "Types: deb-src\n")
    (sources / "debian.sources").write_text(text)
    given = (f"Dir::State::lists={lists}", f"Dir::Etc::sourceparts={sources}", f"Dir::Cache={FOLDER}/cache")
    options = [part for each in (*given, "Dir::Etc::sourcelist=/dev/null") for part in ("-o", each)]
    subprocess.run(["apt-get", *options, "--quiet=2", "update"], check=True)
    command = ["apt-get", *options, "--quiet=2", "--download-only", "source", "kubernetes"]
    subprocess.run(command, cwd=FOLDER, check=True)
    (archive,) = FOLDER.glob("kubernetes_*.orig.tar.gz")
    subprocess.run(["tar", "xzf", archive, "--directory", FOLDER], check=True)
    (source,) = (each for each in FOLDER.glob("kubernetes-*") if each.is_dir())
    return source


def described(source: Path) -> list[str]:
    """The packages whose types the API describes: Debian's source lacks this generated file alone."""
    found = set()
    for top, name in (("pkg", "k8s.io/kubernetes/pkg"), ("staging/src", "k8s.io/kubernetes/vendor")):
        for file in (source / top).rglob("*.go"):
            package = f"{name}/{file.parent.relative_to(source / top)}"
            if not WITHOUT.search(package) and MARKED.search(file.read_text(errors="replace")):
                found.add(package)
    return sorted(found)


def environment() -> dict[str, str]:
    root = FOLDER / "packages/usr/lib/go-1.19"
    own = {"GOROOT": root, "GOPATH": FOLDER / "gopath", "GOCACHE": FOLDER / "cache/go", "HOME": FOLDER}
    fixed = {"GO111MODULE": "off", "CGO_ENABLED": "0", "PATH": f"{root}/bin:{os.environ['PATH']}"}
    return {**os.environ, **{name: str(path) for name, path in own.items()}, **fixed}


def go(*arguments: str) -> None:
    place = FOLDER / "gopath/src/k8s.io/kubernetes"
    subprocess.run(["go", *arguments], cwd=place, env=environment(), check=True)


if __name__ == "__main__":
    try:
        main()
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        sys.exit(f"Kubernetes cannot be had: {error}")
