import pytest

from cafe_tutorial import results


@pytest.mark.parametrize("name", results.names())
def test_every_result_names_where_it_comes_from(name):
    found = results.load(name)
    assert found["command"].startswith("cafe-tutorial ")
    assert {"seed", "device", "versions", "date"} <= found.keys() and found["versions"]["torch"]
    if "--data" in found["command"] and ".npz" in found["command"]:
        assert len(found["data_sha256"]) == 64 and "/" not in found["data"]


def test_unknown_result():
    with pytest.raises(ValueError, match="single_loop_mnist"):
        results.load("nothing")
