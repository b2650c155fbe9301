"""Which worker sees which samples, and in what order. Imports no worker, strategy or backend."""

from __future__ import annotations

from flockstep.data.assignment import (
    ASSIGNMENTS,
    Assignment,
    Coarse,
    Disjoint,
    FineGrained,
    FullOverlap,
    HouseholdOverlap,
    HouseholdShards,
    MediumCoarse,
    NeighbourhoodOverlap,
    find_assignment,
)
from flockstep.data.augmentation import PadCropFlip, ResizedCropFlip
from flockstep.data.batch_growth import BatchGrowth
from flockstep.data.batches import plan_batches
from flockstep.data.course import Batches, Course
from flockstep.data.datasets import DATASETS, dataset, find_dataset
from flockstep.data.fetching import fetch
from flockstep.data.files import folders
from flockstep.data.global_batch import GlobalBatch
from flockstep.data.image_folder import ImageFolder, image_folders
from flockstep.data.memory import InMemory
from flockstep.data.normalisation import CIFAR10_PIXELS, Normalized
from flockstep.data.overlap import Overlap, overlap_of
from flockstep.data.sampling import ORDERS, SHUFFLES, Sampling
from flockstep.data.share import share_of
from flockstep.data.sources import in_order, is_stream, source_of
from flockstep.data.timetable import BatchRule, BatchSize, Timetable

__all__ = [
    "ASSIGNMENTS",
    "CIFAR10_PIXELS",
    "DATASETS",
    "ORDERS",
    "SHUFFLES",
    "Assignment",
    "BatchGrowth",
    "BatchRule",
    "BatchSize",
    "Batches",
    "Coarse",
    "Course",
    "Disjoint",
    "FineGrained",
    "FullOverlap",
    "GlobalBatch",
    "HouseholdOverlap",
    "HouseholdShards",
    "ImageFolder",
    "InMemory",
    "MediumCoarse",
    "NeighbourhoodOverlap",
    "Normalized",
    "Overlap",
    "PadCropFlip",
    "ResizedCropFlip",
    "Sampling",
    "Timetable",
    "dataset",
    "fetch",
    "find_assignment",
    "find_dataset",
    "folders",
    "image_folders",
    "in_order",
    "is_stream",
    "overlap_of",
    "plan_batches",
    "share_of",
    "source_of",
]
