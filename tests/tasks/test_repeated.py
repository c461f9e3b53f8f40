"""The keys that detectors score on repeated segments."""

import pytest
import torch

from tlspectral.heads.detectors.patterns import PATTERNS
from tlspectral.models.hooking.strips import Strip
from tlspectral.tables.detector_columns import DETECTORS
from tlspectral.tasks.repeated import detector_pairs


@pytest.mark.parametrize("name", DETECTORS)
def test_where_no_token_occurs_twice_in_a_segment_a_detector_scores_the_keys_of_its_pattern(name):
    segment = torch.randperm(7, generator=torch.Generator().manual_seed(0)) + 1
    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), segment, segment])
    queries, keys = detector_pairs(name, len(segment))
    marked = PATTERNS[DETECTORS[name].pattern](tokens[None], Strip(0, 15, 15)).expand(1, 15, 15)[0, queries]
    assert queries == list(range(8, 15))  # the second copy
    assert marked.nonzero().tolist() == list(map(list, enumerate(keys)))
