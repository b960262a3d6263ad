"""Models of timm on small pictures, with random weights: one of each of its files.

timm is not needed to develop pykern: `pip install --no-deps timm torchvision==0.28.0`.
"""

from functools import partial
from importlib import import_module
from typing import Any

from tests.zoo.case import Case

from .pictures import define_operators, pictures

_SIDE = 32
# Those whose sizes may be set.
_TINY = {"depth": 4, "embed_dim": 48, "num_heads": 3}

# They take pictures of any size.
ANY_SIZE = """
test_byobnet caformer_s18 convmixer_768_32 test_convnext cpubone_nano crossvit_tiny_240 darknet17
cspnext_tiny davit_tiny densenet121 dla46_c test_nfnet dpn48b vovnet39a test_resnet
edgenext_xx_small test_efficientnet efficientvim_m1 efficientvit_b0 efficientvit_m0 fasternet_t0
fastvit_t8 mobilenetv3_small_050 focalnet_tiny_srf ghostnet_050 hardcorenas_b hgnetv2_b0 hrnet_w18
iformer_t inception_next_atto lcnetv2_small legacy_seresnet18 legacy_xception lowformer_b0
test_mambaout mobilevit_xxs mvitv2_tiny nextvit_small pvt_v2_b0 rdnet_tiny regnetx_002
repghostnet_050 repvit_m1 res2next50 resnest14d resnetv2_18 rexnet_100 sequencer2d_s shvit_s1
skresnet18 starnet_s050 swiftformer_xs tiny_vit_5m_224 tresnet_m twins_svt_small xception41p
xcit_nano_12_p8_224
"""

# They are made for pictures of one size.
ONE_SIZE = """
cait_xxs24_224 coat_tiny test_coatnet deit_tiny_patch16_224 efficientformerv2_s0 gcvit_xxtiny
gmlp_ti16_224 hiera_tiny_224 levit_128s nest_tiny pit_ti_224 swin_tiny_patch4_window7_224
swinv2_tiny_window16_256 swinv2_cr_tiny_224 tnt_s_legacy_patch16_224 visformer_tiny volo_d1_224
"""

SMALL_ANY_SIZE = """
test_vit vit_tiny_patch16_dinov3_qkvb samvit_base_patch16_224 qwen3_vit_88m
naflexvit_base_patch16_gap
"""

SMALL_ONE_SIZE = """
beit_base_patch16_224 convit_tiny test_vit_relpos vit_tiny_r_s16_p8_224
"""

# With the side of the pictures, and what they are made with.
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "csatv2": (64, {}),
    "inception_v3": (96, {}),
    "vitamin_small_224": (_SIDE, {"depth": 4, "img_size": _SIDE}),
}


def _case(name: str, side: int, options: dict[str, Any]) -> Case:
    define_operators()
    return pictures(
        partial(import_module("timm").create_model, name, num_classes=10), side, side, **options
    )


_ALL = {
    **{name: (_SIDE, {}) for name in ANY_SIZE.split()},
    **{name: (_SIDE, {"img_size": _SIDE}) for name in ONE_SIZE.split()},
    **dict.fromkeys(SMALL_ANY_SIZE.split(), (_SIDE, _TINY)),
    **dict.fromkeys(SMALL_ONE_SIZE.split(), (_SIDE, {**_TINY, "img_size": _SIDE})),
    **OTHERS,
}
CASES = {f"timm {name}": partial(_case, name, *how) for name, how in _ALL.items()}
