"""`compress` takes any classifiers and any way of holding images, and says clearly what it cannot take."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import _tiny
import ensbridge as eb
from ensbridge._compress import compress
from ensbridge.metrics.cost import count_macs
from ensbridge.models.feature_choice import choose_feature, list_features
from ensbridge.models.score_net import TokenScore
from ensbridge.models.sizing import MapScore, fitting_score

IMAGES = _tiny.images(32)
LABELS = torch.arange(32) % 3


class Tokens(nn.Module):
    """A small vision transformer of two blocks, whose feature is (B, 16, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 2, 2)
        layers = [nn.TransformerEncoderLayer(16, 2, 64, 0.0, batch_first=True) for _ in range(4)]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(16, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch(images).flatten(2).transpose(1, 2)).mean(1))


def perceptron() -> nn.Module:
    """A network of vectors."""
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(inplace=True), nn.Linear(64, 3))


SOURCES: dict[str, tuple[Callable[[], nn.Module], str, type[nn.Module]]] = {
    "CNN": (_tiny.member, "stages.0.0", MapScore),
    "batch norm": (_tiny.batch_norm_member, "2", MapScore),
    "ViT": (Tokens, "blocks.0", TokenScore),
    "MLP": (perceptron, "1", TokenScore),
}


def quick(members: Any, train: Any = IMAGES, val: Any = None, **options: Any) -> eb.FastEnsemble:
    return compress(
        members, train, val, **{"budget": 30.0, "epochs": 1.0, "source": "frozen", "quiet": True, **options}
    )


@pytest.mark.parametrize("kind", SOURCES)
def test_any_source_gets_a_score_network_of_its_features_shape(kind: str, tmp_path: Path) -> None:
    make, feature, score = SOURCES[kind]
    with _tiny.seeded(0):
        members = [make(), _tiny.member(3), perceptron()]  # of different architectures
    before = [{name: each.clone() for name, each in member.state_dict().items()} for member in members]
    fast = quick(members, feature=feature)
    assert isinstance(fast.each_bridge()[0].score, score)
    assert (fast.source is members[0], fast.members, fast.temperature) == (False, 3, 1.0)
    assert _tiny.same(fast.source.state_dict(), before[0])
    assert fast(IMAGES).shape == (32, 3)
    fast.save(tmp_path)
    again = eb.load(tmp_path, source=copy.deepcopy(members[0]))
    assert again(IMAGES).equal(fast(IMAGES))
    for member, state in zip(members, before, strict=True):  # the user's networks stay as they are
        assert all(each.equal(state[name]) for name, each in member.state_dict().items())
        assert not any(module._forward_hooks for module in member.modules())


def test_it_learns_towards_the_ensemble() -> None:
    members = [_tiny.member(seed) for seed in range(3)]
    target = eb.Ensemble(members)(IMAGES).log_softmax(-1)

    def distance(log_q: Tensor) -> float:
        return (target.exp() * (target - log_q)).sum(-1).mean().item()

    source = distance(members[0](IMAGES).log_softmax(-1))
    fast = quick(members, feature="stages.0.0", epochs=60.0, batch_size=16)
    assert distance(fast(IMAGES).log_softmax(-1)) < 0.5 * source


def test_the_seed_decides_everything() -> None:
    members = [_tiny.member(seed) for seed in range(2)]
    one, same, other = (quick(members, feature="stages.0.0", seed=seed)(IMAGES) for seed in (1, 1, 2))
    assert one.equal(same)
    assert not one.equal(other)


def test_several_bridges_stand_for_all_members_each() -> None:
    members = [_tiny.member(seed) for seed in range(3)]
    one, three = (quick(members, feature="stages.0.0", bridges=count) for count in (1, 3))
    assert [(len(fast.bridges), fast.members) for fast in (one, three)] == [(1, 3), (3, 3)]
    weights = [_tiny.state(bridge) for bridge in three.bridges]
    assert not _tiny.same(weights[0], weights[1])  # they differ by their first weights


def test_labelled_validation_images_choose_and_calibrate(capsys: pytest.CaptureFixture[str]) -> None:
    members = [_tiny.member(seed) for seed in range(2)]
    probabilities = (3 * eb.Ensemble(members)(IMAGES)).softmax(-1)
    labels = torch.multinomial(probabilities, 1, generator=_tiny.generator(0))[:, 0]
    fast = quick(members, val=(IMAGES, labels), feature="stages.0.0", quiet=False)
    assert fast.temperature != 1
    said = capsys.readouterr().err
    assert "validation chose T = " in said
    assert " before, " in said
    plain = quick(members, val=(IMAGES, labels), feature="stages.0.0", calibrate=False)
    assert plain.temperature == 1
    ours, theirs = (eb.metrics.nll(each(IMAGES).log_softmax(-1), labels) for each in (fast, plain))
    assert ours <= theirs


def test_calibration_takes_a_share_of_the_source_where_that_holds_on_other_images(
    capsys: pytest.CaptureFixture[str],
) -> None:
    members = [_tiny.member(seed) for seed in range(2)]
    images = _tiny.images(400)
    plain = quick(members, val=(images[:32], LABELS), feature="stages.0.0", calibrate=False)
    # Labels of which the source knows more than the bridge says, and labels of which nobody knows anything.
    known = ((plain(images) + 4 * members[0](images)) / 0.5).softmax(-1)
    for probabilities, shared in ((known, True), (torch.full((400, 3), 1 / 3), False)):
        labels = torch.multinomial(probabilities, 1, generator=_tiny.generator(0))[:, 0]
        fast = quick(members, val=(images, labels), feature="stages.0.0", quiet=False)
        said = capsys.readouterr().err
        assert (
            (fast.source_logit_weight != 0) == shared == (" of the source's logits: validation NLL" in said)
        )
        few = quick(members, val=(images[:99], labels[:99]), feature="stages.0.0")
        assert few.source_logit_weight == 0
    assert plain.source_logit_weight == 0


# ------------------------------------------------------------------------------ where bridges read


def test_the_earliest_block_that_fits_is_chosen_and_the_cost_is_what_it_says() -> None:
    source, image = eb.nets.ResNet.resnet32x2(10), torch.rand(1, 3, 32, 32)
    site = choose_feature(source, image, None, budget=1.2)
    assert site.feature == "stages.0.0"
    members = [source, eb.nets.ResNet.resnet32x2(10)]
    bridge = eb.methods.DiffusionBridge(eb.Ensemble(members), site.score, site.feature, loss="kl")
    whole = count_macs(eb.FastEnsemble.of(bridge), image) / count_macs(source, image)
    assert site.macs_ratio == pytest.approx(whole, rel=1e-9)
    assert whole <= 1.2
    tight = choose_feature(source, image, None, budget=1.012)
    names = [each.name for each in list_features(source, image)]
    assert names.index(tight.feature) > names.index("stages.0.0")
    assert tight.macs_ratio <= 1.012


def test_a_score_network_grows_with_what_it_may_cost() -> None:
    feature = torch.rand(1, 32, 16, 16)
    costs = []
    for most in (2e6, 4e6, 8e6, 1e9):
        fitting = fitting_score(feature, 10, most)
        assert fitting is not None
        costs.append(count_macs(fitting[1], feature, torch.zeros(1, 10), torch.ones(1)))
        assert costs[-1] <= most
    assert costs == sorted(costs)
    assert len(set(costs)) > 2
    assert fitting_score(feature, 10, 1e3) is None
    assert fitting_score(torch.rand(1, 2, 3, 4, 5), 10, 1e9) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"feature": "layer9"}, "feature 'layer9' is not a module of the source; it has: stem, stages, head"),
        (
            {"feature": "stem", "budget": 1.0001},
            "no bridge fits ×1.0001 the source's cost: the cheapest makes ×",
        ),
        ({"budget": 1.0001}, "no bridge fits ×1.0001 the source's cost: the cheapest makes ×"),
    ],
)
def test_what_cannot_be_bridged_is_explained(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        quick([_tiny.member(0), _tiny.member(1)], **options)
    assert words in str(refused.value)


NUMBER, WHOLE = "it must be a finite number above 0", "it must be a whole number above 0"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"feature": 0}, "feature is 0; give the name of a module of the source, such as 'layer1'"),
        ({"feature": 0, "preprocess": [torch.abs, None]}, "feature is 0; give the name of a module"),
        *(
            ({"budget": value}, f"budget is {value!r}; it must be a finite number of 1 or more")
            for value in ("1.2", 0, 0.99, -1, math.nan, math.inf, None, True)
        ),
        *(({"bridges": value}, f"bridges is {value!r}; {WHOLE}") for value in (0, -1, "2", 1.5, None)),
        *(({"batch_size": value}, f"batch_size is {value!r}; {WHOLE}") for value in (0, "128", 12.5, None)),
        *(({"lr": value}, f"lr is {value!r}; {NUMBER}") for value in (0, "0.1", math.nan, -1e-3, None)),
        *(({"epochs": value}, f"epochs is {value!r}; {NUMBER}") for value in (0, "3", math.nan)),
        *(
            ({"epochs": None, "max_minutes": value}, f"max_minutes is {value!r}; {NUMBER}")
            for value in (0, -1, "2", math.nan, math.inf)
        ),
        ({"max_minutes": 1}, "epochs and max_minutes were both given"),
        ({"calibrate": "no"}, "calibrate is 'no'; give True or False"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number, 0 or above"),
        ({"seed": "a"}, "seed is 'a'; it must be a whole number, 0 or above"),
        ({"seed": -1}, "seed is -1; it must be a whole number, 0 or above"),
        ({"precision": "half"}, "precision is 'half'; it must be one of ('auto', 'float32', 'bfloat16')"),
        ({"precision": torch.float16}, "precision is torch.float16; it must be one of"),
        ({"augment": nn.Identity()}, "augment is a Identity; give an ensbridge.data.Augment"),
        ({"preprocess": [None]}, "preprocess has 1 entries for 2 members; give one each, or None"),
        ({"preprocess": 5}, "preprocess is a int; give a list, with a function or None for each"),
        ({"preprocess": torch.abs}, "preprocess is one function; give a list, with a function or None for"),
        ({"preprocess": [None, 0.5]}, "preprocess has 0.5 for member 2; give a function of images, or None"),
    ],
)
def test_what_no_argument_can_be_is_named_before_any_image_is_read(
    options: dict[str, Any], words: str
) -> None:
    def unread() -> Iterator[Tensor]:
        raise AssertionError("an image was read")
        yield IMAGES

    with pytest.raises(ValueError) as refused:
        quick([_tiny.member(0), _tiny.member(1)], unread(), **options)
    assert words in str(refused.value)


def test_numbers_may_be_numpys(tmp_path: Path) -> None:
    members = [_tiny.member(seed) for seed in range(2)]
    plain = quick(members, feature="stages.0.0", batch_size=16, lr=0.5)
    numbers = {
        "batch_size": np.int64(16),
        "lr": np.float32(0.5),
        "epochs": np.float32(1),
        "bridges": np.int8(1),
    }
    assert quick(members, feature="stages.0.0", run_dir=tmp_path, **numbers)(IMAGES).equal(plain(IMAGES))


def test_one_member_is_no_ensemble() -> None:
    for members in ([_tiny.member(0)], eb.Ensemble([_tiny.member(0)]), iter([_tiny.member(0)])):
        with pytest.raises(ValueError, match="1 members were given to compress"):
            quick(members)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (_tiny.batch_norm_member(), "members is one network, a Sequential; give a list of at least 2"),
        (_tiny.member(), "members is one network, a ResNet; give a list of at least 2"),
        ({"a": _tiny.member(0), "b": _tiny.member(1)}, "members is a dict; give a list, with the network"),
        (nn.ModuleDict({"a": _tiny.member(0)}), "members is a ModuleDict; give a list, with the network"),
        ({_tiny.member(0), _tiny.member(1)}, "members is a set; give a list, with the network"),
        ("ab", "members is a str; give a list of networks"),
        (5, "members is a int; give a list of networks"),
        (["a.pt", "b.pt"], "member 1 is a str; give networks, nn.Module"),
        ([_tiny.member(), _tiny.member], "member 2 is a function; give networks, nn.Module"),
    ],
)
def test_what_is_no_list_of_networks_is_named(members: Any, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        quick(members)
    assert words in str(refused.value)


def test_members_come_in_any_order_that_is_one() -> None:
    members = [_tiny.member(seed) for seed in range(3)]
    first = quick(members, feature="stages.0.0")(IMAGES)
    for same in (tuple(members), iter(members), nn.ModuleList(members), eb.Ensemble(members)):
        assert quick(same, feature="stages.0.0")(IMAGES).equal(first)


def test_wrapped_members_are_the_networks_inside(tmp_path: Path) -> None:
    members = [_tiny.member(seed) for seed in range(2)]
    plain = quick(members, feature="stages.0.0")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for wrap in (DataParallel, DistributedDataParallel, lambda net: torch.compile(DataParallel(net))):
            fast = quick([wrap(net) for net in members], feature="stages.0.0")
            assert type(fast.source) is type(members[0])
            assert fast(IMAGES).equal(plain(IMAGES))
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(ValueError, match="the same network was given twice"):
        quick([members[0], DataParallel(members[0])])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_networks_can_teach_but_not_be_the_source() -> None:
    with _tiny.seeded(0):
        source, other = perceptron().eval(), perceptron().eval()
    plain = quick([source, other], feature="1")(IMAGES)
    scripted, traced = torch.jit.script(other), torch.jit.trace(other, IMAGES[:2])
    for teacher in (scripted, traced):
        torch.testing.assert_close(quick([source, teacher], feature="1")(IMAGES), plain)
    mixed = nn.Sequential(torch.jit.script(nn.Flatten()), *list(other)[1:])
    for first, feature in ((scripted, None), (scripted, "1"), (traced, "1"), (mixed, None), (mixed, "0")):
        with pytest.raises(ValueError, match=r"the first member is scripted by torch\.jit"):
            quick([first, source], feature=feature)
    assert quick([mixed, source], feature="1")(IMAGES).shape == (32, 3)


def test_members_that_are_given_twice_or_cannot_take_the_images_are_named() -> None:
    member = _tiny.member(0)
    with pytest.raises(ValueError, match="the same network was given twice"):
        quick([member, member])
    other = nn.Sequential(nn.Flatten(), nn.Linear(7, 3))
    words = r"member 2 cannot take images of torch.float32 and shape \(3, 8, 8\) .*preprocess="
    with pytest.raises(ValueError, match=words):
        quick([member, other])
    with pytest.raises(ValueError, match=r"shape \(8, 8, 3\) .* with \.permute\(0, 3, 1, 2\)"):
        quick([member, _tiny.member(1)], IMAGES.permute(0, 2, 3, 1))
    with pytest.raises(ValueError, match=r"torch\.float64 .* each with \.float\(\)"):
        quick([member, _tiny.member(1)], IMAGES.double())


class Wrong(nn.Module):
    """A network that returns what a test says."""

    def __init__(self, output: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.output = output

    def forward(self, images: Tensor) -> Tensor:
        return self.output(images.flatten(1)[:, :3])


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (lambda x: x.softmax(-1), "member 2 returns probabilities; give it without its softmax"),
        (lambda x: x / 0, "member 2 returns logits that are not finite"),
        (lambda x: x[:, :1], r"member 2 returns \(8, 1\) for 8 images"),
        (lambda x: x[:, :, None], r"member 2 returns \(8, 3, 1\) for 8 images"),
        (lambda x: x[:, :2], "member 2 has 2 classes, the first 3; all must have the same"),
        (lambda x: (x, x), "member 2: a network returned a tuple; it must return logits"),
    ],
)
def test_what_is_no_classifier_is_named(output: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        quick([_tiny.member(0), Wrong(output)])


@pytest.mark.parametrize(
    ("val", "options", "words"),
    [
        ((IMAGES, LABELS + 1), {}, "val has labels from 1 to 3; the members' are 0 to 2"),
        (IMAGES[:, :, 1:], {}, r"val has images of shape \(3, 7, 8\), train of \(3, 8, 8\)"),
        (255 * IMAGES, {}, r"val has pixels from .* to 25\d, train from .*; give them alike"),
        (None, {"max_minutes": 1}, "epochs and max_minutes were both given"),
    ],
)
def test_what_would_fail_after_training_is_refused_before(val: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        quick([_tiny.member(0), _tiny.member(1)], val=val, **options)


def test_images_of_another_type_than_the_weights_are_named() -> None:
    with pytest.raises(ValueError, match=r"torch\.float32 .* each with \.float\(\)"):
        quick([_tiny.member(0).half(), _tiny.member(1).half()])


def test_a_few_images_calibrate_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    val = IMAGES[:3], LABELS[:3]
    fast = quick([_tiny.member(0), _tiny.member(1)], val=val, feature="stages.0.0", quiet=False)
    assert fast.temperature == 1
    assert "not calibrated: 3 validation images gave a temperature of" in capsys.readouterr().err


def test_compiled_members_are_saved_as_they_are_without_it(tmp_path: Path) -> None:
    members = [_tiny.member(seed) for seed in range(2)]
    fast = quick([torch.compile(net) for net in members], feature="stages.0.0")  # type: ignore[misc]
    assert type(fast.source) is type(members[0])
    fast.save(tmp_path)
    assert eb.load(tmp_path)(IMAGES).equal(fast(IMAGES))


def test_the_result_knows_what_images_it_takes() -> None:
    members = [_tiny.member(seed) for seed in range(2)]
    fast = quick(members, feature="stages.0.0")
    assert fast.image_shape == (3, 8, 8)
    assert fast.pixel_range == (IMAGES.min().item(), IMAGES.max().item())
    whole = quick(members, (255 * IMAGES).byte(), feature="stages.0.0")
    assert whole.pixel_range == ((255 * IMAGES).byte().min() / 255, (255 * IMAGES).byte().max() / 255)


def test_precision_is_the_users_to_choose_and_networks_come_home() -> None:
    members = [_tiny.member(seed) for seed in range(2)]
    plain, same, rough = (
        quick(members, feature="stages.0.0", precision=precision)(IMAGES)
        for precision in ("auto", "float32", "bfloat16")
    )
    assert plain.equal(same)  # on the CPU
    assert not plain.equal(rough)
    torch.testing.assert_close(plain, rough, rtol=0.1, atol=0.1)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="the device is 'cuda', and torch sees no GPU here"):
            quick(members, device="cuda")


def test_few_steps_are_said_before_they_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    quick([_tiny.member(0), _tiny.member(1)], feature="stages.0.0", quiet=False, batch_size=8, epochs=2)
    words = capsys.readouterr().err
    assert words.index("only 8 steps") < words.index("training, 8 steps")
    assert "epochs=50 or more" in words
