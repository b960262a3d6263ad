"""Models of torchvision on small pictures and clips, with random weights.

torchvision is not needed to develop pykern: `pip install --no-deps torchvision==0.28.0`.
"""

from functools import partial
from importlib import import_module
from typing import Any

from tests.zoo.case import Case

from .pictures import define_operators, pictures

_SIDE = 32
_SQUARE = (_SIDE, _SIDE)
_CLIP = (4, _SIDE, _SIDE)
_BARE = {"weights": None, "weights_backbone": None, "num_classes": 5}

CLASSIFIERS = """
resnet18 resnet34 resnext50_32x4d densenet121 squeezenet1_0 squeezenet1_1
shufflenet_v2_x0_5 shufflenet_v2_x1_0 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large
mnasnet0_5 mnasnet0_75 efficientnet_b0 efficientnet_v2_s regnet_y_400mf regnet_x_400mf
convnext_tiny swin_t swin_v2_t
"""

# With the size of the pictures, and what they are made with.
OTHERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "alexnet": ((64, 64), {"dropout": 0.0}),
    "googlenet": ((64, 64), {"aux_logits": False, "init_weights": False, "dropout": 0.0}),
    "inception_v3": ((96, 96), {"aux_logits": False, "init_weights": False, "dropout": 0.0}),
    "maxvit.MaxVit": (
        (64, 64),
        {
            "input_size": (64, 64),
            "stem_channels": 16,
            "partition_size": 2,
            "block_channels": [16, 32],
            "block_layers": [1, 1],
            "head_dim": 8,
            "stochastic_depth_prob": 0.0,
        },
    ),
    "vision_transformer.VisionTransformer": (
        _SQUARE,
        {
            "image_size": _SIDE,
            "patch_size": 8,
            "num_layers": 4,
            "num_heads": 4,
            "hidden_dim": 32,
            "mlp_dim": 64,
        },
    ),
    "segmentation.lraspp_mobilenet_v3_large": (_SQUARE, _BARE),
    "segmentation.deeplabv3_mobilenet_v3_large": ((64, 64), _BARE),
    "segmentation.fcn_resnet50": (_SQUARE, _BARE),
    "video.mc3_18": (_CLIP, {}),
    "video.r3d_18": (_CLIP, {}),
    "video.r2plus1d_18": (_CLIP, {}),
    "video.swin3d_t": ((4, 64, 64), {}),
}


def _case(name: str, size: tuple[int, ...], options: dict[str, Any]) -> Case:
    define_operators()
    make = import_module("torchvision").models
    for part in name.split("."):
        make = getattr(make, part)
    return pictures(make, *size, **options)


CASES = {
    f"torchvision {name}": partial(_case, name, *how)
    for name, how in {**dict.fromkeys(CLASSIFIERS.split(), (_SQUARE, {})), **OTHERS}.items()
}
