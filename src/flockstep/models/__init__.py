"""Networks for the built-in tasks and studies.

Example:
    model = fs.models.LeNet5()
"""

from flockstep.models.alexnet import AlexNet
from flockstep.models.cifar10_full import Cifar10Full
from flockstep.models.counting import cc_ratio, count_parameters, flops_per_sample
from flockstep.models.densenet import DenseNet40
from flockstep.models.digits_cnn import DigitsCNN
from flockstep.models.ensemble import Ensemble
from flockstep.models.googlenet import GoogLeNetV2
from flockstep.models.gpt import GPT
from flockstep.models.group_batch_norm import (
    GroupBatchNorm,
    distribute_batch_norm,
    is_batch_norm,
)
from flockstep.models.lenet import LeNet, LeNet5
from flockstep.models.mlp import MLP
from flockstep.models.recalibration import recalibrate
from flockstep.models.resnet import ResNet18, ResNet20, ResNet50
from flockstep.models.row_lstm import RowLSTM

__all__ = [
    "GPT",
    "MLP",
    "AlexNet",
    "Cifar10Full",
    "DenseNet40",
    "DigitsCNN",
    "Ensemble",
    "GoogLeNetV2",
    "GroupBatchNorm",
    "LeNet",
    "LeNet5",
    "ResNet18",
    "ResNet20",
    "ResNet50",
    "RowLSTM",
    "cc_ratio",
    "count_parameters",
    "distribute_batch_norm",
    "flops_per_sample",
    "is_batch_norm",
    "recalibrate",
]
