"""Each way in which weights come meets each contradiction and each redundancy, and treats it as all others do."""

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from dora.client.all_ranks import AllRanks
from dora.client.device_image import Images
from dora.client.publication import take_weights
from dora.client.taking import take_files
from dora.errors import InvalidValue
from dora.models.tiny import make_tiny
from dora.weights.contradictions import check_folder
from dora.weights.reference import HEAD
from dora.weights.store import WeightStore
from tests import host_images
from tests.refusals import refused

SEED: Final = 63
EMBEDDING: Final = "model.embed_tokens.weight"
NORM: Final = "model.norm.weight"
FILE: Final = "model.safetensors"
DERIVED: Final = "model.layers.0.self_attn.rotary_emb.inv_freq"
Tensors = dict[str, torch.Tensor]


# ------------------------------------------------------------------------------------------------------- the cases


def changed(tensors: Tensors, case: str, chance: random.Random) -> Tensors:
    embedding = tensors[EMBEDDING]
    found = {name: tensor for name, tensor in tensors.items() if name != HEAD}
    other = embedding.clone()
    other[chance.randrange(len(other)), chance.randrange(other.shape[1])] += 1
    if case not in ("no head", "head that is the embedding", "equal head", "other head", "longer head"):
        found = dict(tensors)
    return (
        found
        | {
            "as it is": {},
            "no head": {},
            "head that is the embedding": {HEAD: embedding},
            "equal head": {HEAD: embedding.clone()},
            "other head": {HEAD: other},
            "longer head": {HEAD: torch.cat([embedding, embedding[:1]])},
            "extra tensor": {"model.another.weight": torch.ones(2)},
            "missing tensor": {NORM: torch.empty(0)},
            "wrong shape": {NORM: torch.ones(3)},
            "integers": {NORM: torch.ones_like(tensors[NORM], dtype=torch.int32)},
            "doubles": {NORM: torch.ones_like(tensors[NORM], dtype=torch.float64)},
            "derived tensor": {DERIVED: torch.ones(4)},
        }[case]
    )


# By case: the tensor by which a model with a tied head, and one with a head of its own, refuse it; empty: it is taken.
CASES: Final[dict[str, tuple[str, str]]] = {
    "as it is": ("", ""),
    "no head": ("", HEAD),
    "head that is the embedding": ("", ""),
    "equal head": ("", ""),
    "other head": (HEAD, ""),
    "longer head": (HEAD, HEAD),
    "extra tensor": ("model.another.weight", "model.another.weight"),
    "missing tensor": (NORM, NORM),
    "wrong shape": (NORM, NORM),
    "integers": (NORM, NORM),
    "doubles": ("", ""),
    "derived tensor": ("", ""),
}
BYTEWISE: Final = ("file", "folder", "shards", "upload")  # these are not converted


# -------------------------------------------------------------------------------------------------------- the ways


def module_of(tensors: Tensors, tied: bool) -> torch.nn.Module:
    root: Any = torch.nn.Module()
    root.config = {"tie_word_embeddings": tied}
    made: dict[int, torch.nn.Parameter] = {}  # the head that is the embedding is one parameter
    for name, tensor in tensors.items():
        place, *path = root, *name.split(".")
        for part in path[:-1]:
            if part not in place._modules:
                place.add_module(part, torch.nn.Module())
            place = place._modules[part]
        place.register_parameter(path[-1], made.setdefault(id(tensor), torch.nn.Parameter(tensor, False)))
    return root  # type: ignore[no-any-return]


def written(tensors: Tensors, folder: Path, chance: random.Random, *, shards: int = 1) -> list[Path]:
    """Files in which no tensor shares another one's memory, as the format has it."""
    folder.mkdir()
    names = sorted(tensors)
    chance.shuffle(names)
    files = []
    for number in range(min(shards, len(names))):
        files.append(folder / (FILE if shards == 1 else f"model-{number}.safetensors"))
        save_file({name: tensors[name].clone() for name in names[number::shards]}, files[-1])
    return files


def give(way: str, tensors: Tensors, folder: Path, chance: random.Random) -> Any:
    return {
        "dict": lambda: tensors,
        "arrays": lambda: {name: tensor.numpy() for name, tensor in tensors.items()},
        "module": lambda: module_of(tensors, chance.random() < 0.5),
        "image": lambda: tensors,
        "all ranks": lambda: AllRanks(module_of(tensors, chance.random() < 0.5)),
        "file": lambda: written(tensors, folder, chance)[0],
        "folder": lambda: written(tensors, folder, chance)[0].parent,
        "shards": lambda: written(tensors, folder, chance, shards=len(tensors) - 1),
        "upload": lambda: written(tensors, folder, chance),
    }[way]()


WAYS: Final = ("dict", "arrays", "module", "image", "all ranks", *BYTEWISE)


def publish(way: str, given: Any, store: WeightStore) -> Path:
    incoming = store.begin(1, 1)
    if way == "upload":  # by a client that checks nothing itself
        taken = take_files(given, incoming)
    else:
        images = Images(host_images.made) if way == "image" else None
        taken = take_weights(given, store.reference.tensors, incoming, images=images)
    with closing(taken):
        taken.examine()
        taken.bring(incoming)
        return store.publish(1, 1, taken.identities, None)


def tensors_in(folder: Path) -> Tensors:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


# ------------------------------------------------------------------------------------------------------- the models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {"tied": make_tiny("dense", folder / "tied"), "untied": make_tiny("dense", folder / "untied", tied=False)}
    found["tied, with a copy of its head"] = shutil.copytree(found["tied"], folder / "copy")
    tensors = load_file(folder / "copy" / FILE)
    save_file({**tensors, HEAD: tensors[EMBEDDING].clone()}, folder / "copy" / FILE)
    return found


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("model", ["tied", "tied, with a copy of its head", "untied"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_each_way_treats_each_case_alike(
    case: str, way: str, model: str, models: Mapping[str, Path], tmp_path: Path
) -> None:
    chance = random.Random(f"{SEED} {case} {way} {model}")
    store = WeightStore(tmp_path / "store", models[model])
    tensors = changed(load_file(models[model] / FILE), case, chance)
    if case == "missing tensor":
        del tensors[NORM]
    names = CASES[case][model == "untied"]
    if case == "doubles" and way in BYTEWISE:
        names = NORM
    given = give(way, tensors, tmp_path / "given", chance)
    if names:
        with refused(InvalidValue, names=[names]):
            publish(way, given, store)
        assert store.versions() == (0,)
        return
    found = tensors_in(publish(way, given, store))
    expected = {name: tensor.to(torch.float32) for name, tensor in tensors.items()}
    if model != "untied":
        head = found.pop(HEAD, None)  # equal to the embedding, if it is there
        assert head is None or torch.equal(head, found[EMBEDDING])
        assert head is None or way in ("all ranks", "upload"), "a tied head is published once"
        expected.pop(HEAD, None)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


HEADS: Final = ("no head", "equal head", "other head")


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_start_folder_is_treated_as_a_commit(
    case: str, model: str, shards: int, models: Mapping[str, Path], tmp_path: Path
) -> None:
    chance = random.Random(f"{SEED} {case} {model} {shards}")
    tensors = changed(load_file(models[model] / FILE), case, chance)
    written(tensors, tmp_path / "start", chance, shards=shards)
    for file in models[model].glob("*.json"):
        shutil.copy(file, tmp_path / "start")
    if names := CASES[case][model == "untied"]:
        with refused(InvalidValue, field="--model", names=[names]):
            check_folder(tmp_path / "start")
        return
    check_folder(tmp_path / "start")
    store = WeightStore(tmp_path / "store", tmp_path / "start")
    published = publish("dict", tensors, store)
    assert tensors_in(published).keys() == tensors.keys() - ({HEAD} if model == "tied" else set())


MADE: Final[dict[str, Callable[[Any], Any]]] = {
    "one parameter": lambda module: module,
    "a parameter of its own": lambda module: setattr(
        module.lm_head, "weight", torch.nn.Parameter(module.lm_head.weight.detach().clone())
    ),
}


@pytest.mark.parametrize("head", MADE)
@pytest.mark.parametrize("says", [True, False])
def test_the_canary_of_a_module_whose_head_equals_its_embedding(
    head: str, says: bool, models: Mapping[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from dora.client.publication import canary_of
    from dora.client.skeleton import Skeleton
    from dora.weights.canary import compute_canary

    module: Any = AutoModelForCausalLM.from_pretrained(models["tied"], dtype=torch.float32)
    plain = compute_canary(module)
    MADE[head](module)
    module.config.tie_word_embeddings = says
    skeleton = Skeleton.of(module, module.config.to_dict())
    store = WeightStore(tmp_path / "store", models["tied"])
    with closing(take_weights(module, store.reference.tensors, store.begin(1, 1))) as taken:
        assert skeleton is not None and skeleton.canary(taken) == plain
    assert canary_of(module, store.reference.tensors) == plain
