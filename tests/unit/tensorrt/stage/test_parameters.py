from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from trtllm_pipeline.tensorrt.stage import params


def test_a_class_of_parameters_is_a_frozen_dataclass_given_by_name() -> None:
    one = params.ScoreParams(min_score=0.5)
    assert dataclasses.replace(one, min_score=None) == params.ScoreParams()
    assert one == copy.deepcopy(one) == pickle.loads(pickle.dumps(one))
    assert one != params.AccuracyParams(min_score=0.5), "another class is another stage"
    assert len({one, params.ScoreParams(min_score=0.5), params.ScoreParams()}) == 2
    assert repr(one) == "ScoreParams(metrics=('exact', 'contains'), min_score=0.5)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.min_score = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'source'"):
        params.DownloadParams()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'min_scores'"):
        params.ScoreParams(min_scores=0.5)  # type: ignore[call-arg]
    assert params.PerfParams().declared is not params.PerfParams().declared
