"""The stand-ins for torchvision's compiled operators, and when they are used."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import fresh
import pytest
import torch
from precision import EXACT
from torch import Tensor

from stainlock.models import torchvision_import, torchvision_operators

torchvision_import.ensure_torchvision()


def naive_nms(boxes: Tensor, scores: Tensor, threshold: float) -> list[int]:
    """Best box first, in order of appearance among equals; drop whatever overlaps a kept one too much."""

    def iou(a: list[float], b: list[float]) -> float:
        width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
        inter = max(width, 0.0) * max(height, 0.0)
        union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inter
        return inter / union if union else 0.0

    rows = boxes.tolist()
    kept: list[int] = []
    for i in sorted(range(len(rows)), key=lambda i: -scores[i].item()):
        if all(iou(rows[i], rows[k]) <= threshold for k in kept):
            kept.append(i)
    return kept


def naive_roi_align(
    image: Tensor, rois: Tensor, scale: float, bins: tuple[int, int], ratio: int, aligned: bool
) -> Tensor:
    """The definition, one sample at a time."""
    _, channels, height, width = image.shape

    def sample(feature: Tensor, y: float, x: float) -> Tensor:
        if not (-1 <= y <= height and -1 <= x <= width):
            return feature.new_zeros(channels)
        y, x = min(max(y, 0.0), height - 1), min(max(x, 0.0), width - 1)
        top, left = math.floor(y), math.floor(x)
        bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
        fy, fx = y - top, x - left
        upper = feature[:, top, left] * (1 - fx) + feature[:, top, right] * fx
        lower = feature[:, bottom, left] * (1 - fx) + feature[:, bottom, right] * fx
        return upper * (1 - fy) + lower * fy

    out = image.new_zeros(len(rois), channels, *bins)
    for k, roi in enumerate(rois.tolist()):
        x0, y0, x1, y1 = (c * scale - (0.5 if aligned else 0.0) for c in roi[1:])
        w, h = (x1 - x0, y1 - y0) if aligned else (max(x1 - x0, 1.0), max(y1 - y0, 1.0))
        bin_h, bin_w = h / bins[0], w / bins[1]
        ny = ratio if ratio > 0 else math.ceil(h / bins[0])
        nx = ratio if ratio > 0 else math.ceil(w / bins[1])
        for i, j in itertools.product(range(bins[0]), range(bins[1])):
            for sy, sx in itertools.product(range(ny), range(nx)):
                y = y0 + i * bin_h + (sy + 0.5) * bin_h / ny
                x = x0 + j * bin_w + (sx + 0.5) * bin_w / nx
                out[k, :, i, j] += sample(image[int(roi[0])], y, x) / max(ny * nx, 1)
    return out


def random_rois(count: int, images: int, extent: float, generator: torch.Generator) -> Tensor:
    """Regions that also reach beyond the image, and some smaller than a pixel."""
    corner = torch.rand(count, 2, generator=generator, dtype=torch.float64) * 1.2 * extent - 0.2 * extent
    size = torch.rand(count, 2, generator=generator, dtype=torch.float64) ** 2 * extent
    image = torch.randint(images, (count, 1), generator=generator)
    return torch.cat((image.double(), corner, corner + size), 1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("ties", [False, True])
def test_nms_is_the_greedy_loop(seed: int, threshold: float, ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(150, 2, generator=generator, dtype=torch.float64) * 60
    size = torch.rand(150, 2, generator=generator, dtype=torch.float64) * 40
    boxes = torch.cat((corner, corner + size), 1)
    scores = torch.rand(150, generator=generator, dtype=torch.float64)
    if ties:  # equal scores, equal boxes, and overlaps that hit the threshold exactly
        boxes, scores = (boxes / 10).round(), (scores * 8).round()
    expected = naive_nms(boxes, scores, threshold)
    assert 1 < len(expected) < 150 or threshold == 1.0
    assert torchvision_operators.nms(boxes, scores, threshold).tolist() == expected


def test_nms_in_blocks_is_nms_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(300, 2, generator=generator) * 60
    boxes = torch.cat((corner, corner + 20), 1)
    scores = torch.rand(300, generator=generator)
    whole = torchvision_operators.nms(boxes, scores, 0.4)
    monkeypatch.setattr(torchvision_operators, "_BLOCK", 7)
    assert torch.equal(torchvision_operators.nms(boxes, scores, 0.4), whole)


def test_nms_compares_in_double_like_the_compiled_one() -> None:
    # IoU is float32(0.2) here, a little above 0.2 in double: the second box goes.
    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 5.0, 1.0]])
    scores = torch.tensor([0.9, 0.8])
    assert torchvision_operators.nms(boxes, scores, 0.2).tolist() == [0]
    assert torchvision_operators.nms(boxes.double(), scores.double(), 0.2).tolist() == [0, 1]


def test_nms_without_boxes() -> None:
    assert torchvision_operators.nms(torch.zeros(0, 4), torch.zeros(0), 0.5).shape == (0,)


@pytest.mark.exact
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("ratio", [-1, 2])
@pytest.mark.parametrize(("scale", "bins"), [(1.0, (3, 3)), (0.25, (2, 5))])
def test_roi_align_is_its_definition(
    dtype: torch.dtype, aligned: bool, ratio: int, scale: float, bins: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(2, 3, 11, 14, generator=generator, dtype=torch.float64)
    rois = random_rois(25, 2, 14 / scale, generator)
    expected = naive_roi_align(image, rois, scale, bins, ratio, aligned)
    actual = torchvision_operators.roi_align(image.to(dtype), rois.to(dtype), scale, *bins, ratio, aligned)
    assert actual.dtype == dtype
    # Coordinates of up to 56, rounded to the type, move a sample by up to 56·ε/2 between pixels that differ by a few.
    torch.testing.assert_close(actual.double(), expected, atol=256 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("ratio", [-1, 2])
def test_roi_align_backward_is_its_transpose(aligned: bool, ratio: int) -> None:
    """roi_align is linear in the image, so <A x, g> = <x, Aᵀ g>."""
    generator = torch.Generator().manual_seed(2)
    image = torch.randn(2, 3, 9, 8, generator=generator, dtype=torch.float64)
    rois = random_rois(140, 2, 9.0, generator)  # more than one chunk
    pooled = torchvision_operators.roi_align(image, rois, 1.0, 2, 3, ratio, aligned)
    grad = torch.randn(pooled.shape, generator=generator, dtype=torch.float64)
    pulled = torchvision_operators._roi_align_backward(grad, rois, 1.0, 2, 3, *image.shape, ratio, aligned)
    torch.testing.assert_close((pooled * grad).sum(), (image * pulled).sum())


def test_roi_align_gradient_through_torchvision() -> None:
    from torchvision.ops import roi_align

    generator = torch.Generator().manual_seed(3)
    image = torch.randn(2, 2, 6, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    rois = random_rois(4, 2, 6.0, generator)
    assert torch.autograd.gradcheck(lambda x: roi_align(x, rois, (2, 2), 0.5, 2, True), image)


def test_torchvision_ops_are_ours_or_equal_to_ours() -> None:
    import torchvision

    generator = torch.Generator().manual_seed(4)
    corner = torch.rand(200, 2, generator=generator) * 50
    boxes = torch.cat((corner, corner + 15), 1)
    scores = torch.rand(200, generator=generator)
    assert torch.equal(torchvision.ops.nms(boxes, scores, 0.4), torchvision_operators.nms(boxes, scores, 0.4))
    image = torch.randn(2, 3, 10, 10, generator=generator, dtype=torch.float64)
    rois = random_rois(10, 2, 10.0, generator)
    torch.testing.assert_close(
        torchvision.ops.roi_align(image, rois, (3, 3), 1.0, 2, True),
        torchvision_operators.roi_align(image, rois, 1.0, 3, 3, 2, True),
        atol=EXACT,
        rtol=0,
    )


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vit_b_16", "swin_t"])
def test_classifiers_build(name: str) -> None:
    import torchvision

    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None)
    assert sum(p.numel() for p in model.parameters()) > 1e6


def test_a_detector_runs() -> None:
    import torchvision

    model = torchvision.models.get_model(
        "ssdlite320_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=5, score_thresh=0.0
    ).eval()
    image = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        (found,) = model([image])
    assert len(found["boxes"]) == len(found["scores"]) == len(found["labels"]) > 0


def test_calling_again_changes_nothing() -> None:
    first = torchvision_import.ensure_torchvision()
    before = {name: id(module) for name, module in sys.modules.items() if name.startswith("torchvision")}
    nms = torch.ops.torchvision.nms
    assert torchvision_import.ensure_torchvision() == first in {"native", "fallback"}
    after = {name: id(module) for name, module in sys.modules.items() if name.startswith("torchvision")}
    assert after == before
    assert torch.ops.torchvision.nms is nms


def package(root: Path, init: str, extension: str = "") -> Path:
    """A package called torchvision that replaces the real one."""
    folder = root / "torchvision"
    folder.mkdir()
    (folder / "__init__.py").write_text(textwrap.dedent(init))
    (folder / "extension.py").write_text(textwrap.dedent(extension))
    return root


@pytest.mark.parametrize(
    ("init", "error"),
    [
        ("raise RuntimeError('something else')", RuntimeError),
        ("import a_module_that_is_not_there", ModuleNotFoundError),
        ("raise ImportError('libjpeg')", ImportError),
    ],
)
def test_other_failures_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str, error: type[Exception]
) -> None:
    monkeypatch.syspath_prepend(package(tmp_path, init))
    monkeypatch.delitem(sys.modules, "torchvision")
    with pytest.raises(error, match=r"something else|a_module_that_is_not_there|libjpeg"):
        torchvision_import.ensure_torchvision()


def test_absent_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert torchvision_import.ensure_torchvision() == "absent"


# What follows depends on the state of a fresh interpreter.


def run(script: str, *path: Path) -> str:
    """stdout of an interpreter that has loaded torch, with ``path`` first in sys.path; warnings are errors."""
    done = fresh.run(f"import sys\nsys.path[:0] = {[str(p) for p in path]!r}\n{textwrap.dedent(script)}", strict=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Loads the one file alone; the package is imported only if operators are missing.
LOAD = f"""
import importlib.util, torch
spec = importlib.util.spec_from_file_location("operators", {torchvision_import.__file__!r})
operators = importlib.util.module_from_spec(spec)
spec.loader.exec_module(operators)
"""


def test_stainlock_before_torchvision() -> None:
    """In a new process, as stainlock is imported before torch too."""
    script = """
        import stainlock
        import torchvision
        print(torchvision.ops.nms is not None, torchvision.models.resnet18(weights=None).fc.out_features)
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "True 1000"), done.stderr


def test_importing_stainlock_after_a_failed_torchvision() -> None:
    script = """
        try:
            import torchvision
        except RuntimeError:
            pass
        import stainlock
        import torchvision
        print(torchvision.models.resnet18(weights=None).fc.out_features)
    """
    assert run(script) == "1000"


def test_survives_being_loaded_twice() -> None:
    second = LOAD.replace("operators =", "again =").replace("exec_module(operators)", "exec_module(again)")
    script = f"{LOAD}\nfirst = operators.ensure_torchvision()\n{second}\ndel operators\n" + textwrap.dedent(
        """
        import gc; gc.collect()
        import torchvision
        print(first == again.ensure_torchvision())
        print(torchvision.ops.nms(torch.zeros(1, 4), torch.ones(1), 0.5).tolist())
        """
    )
    assert run(script) == "True\n[0]"


def test_left_alone_where_the_real_operators_load(tmp_path: Path) -> None:
    """A torchvision that imports without trouble, and has registered its own operators."""
    native = """
        import torch
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl("nms", lambda dets, scores, iou_threshold: torch.tensor([42]), "CPU")
        def _has_ops(): return True
    """
    path = package(tmp_path, "from . import extension", native)
    script = LOAD + textwrap.dedent(
        """
        def forbidden(*args, **kwargs):
            raise AssertionError("an operator library was defined")

        import torchvision
        original, names = torchvision.extension._has_ops, set(vars(torchvision.extension))
        torch.library.Library = forbidden
        print(operators.ensure_torchvision(), operators.ensure_torchvision())
        print(torch.ops.torchvision.nms(torch.zeros(1, 4), torch.ones(1), 0.5).item())
        print(hasattr(torch.ops.torchvision, "roi_align"))
        print(torchvision.extension._has_ops is original, set(vars(torchvision.extension)) == names)
        """
    )
    assert run(script, path) == "native native\n42\nFalse\nTrue True"


# The ways in which releases of torchvision, new and old, get at their own submodule.
NEW = "from . import extension"
OLD = "import torchvision.extension; extension = torchvision.extension"


@pytest.mark.parametrize("look_up", [NEW, OLD])
def test_stands_in_where_they_do_not(tmp_path: Path, look_up: str) -> None:
    """Also the gradient, which older releases of torchvision leave to the compiled library."""
    broken = f"""
        {look_up}
        extension._has_ops()
        import torch
        if not hasattr(torch.ops.torchvision, "nms"):
            raise RuntimeError("operator torchvision::nms does not exist")
        assert extension._has_ops()
    """
    path = package(tmp_path, broken, "def _has_ops(): return False")
    script = LOAD + textwrap.dedent(
        """
        print(operators.ensure_torchvision(), operators.ensure_torchvision())
        print(torch.ops.torchvision.nms(torch.zeros(1, 4), torch.ones(1), 0.5).item())
        print(torch.ops.torchvision._cuda_version())
        try:
            torch.ops.torchvision.roi_pool(torch.zeros(1, 1, 4, 4), torch.zeros(1, 5), 1.0, 2, 2)
        except NotImplementedError:
            print("no kernel")
        image = torch.rand(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
        rois = torch.tensor([[0, 0.3, 0.2, 4.1, 3.7]], dtype=torch.float64)
        op = torch.ops.torchvision.roi_align
        print(torch.autograd.gradcheck(lambda x: op(x, rois, 1.0, 2, 2, 2, True), image))
        """
    )
    assert run(script, path) == "fallback fallback\n0\n-1\nno kernel\nTrue"
