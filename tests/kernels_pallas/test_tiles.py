"""The tile data: read strictly, written as it is read, replaced as a whole or not at all."""

import json

import pytest

from kernels_pallas import tiles
from kernels_pallas.dispatch import Target
from kernels_pallas.tiles import CHIPS, TILES_FILE, TilesError

TEXT = TILES_FILE.read_text(encoding="utf-8")
H100 = Target("gpu", (9, 0))


def test_the_file_is_as_it_would_be_written():
    assert tiles.dumps(CHIPS) == TEXT
    assert tiles.loads(TEXT) == CHIPS
    assert set(CHIPS) >= {(8, 0), (9, 0), (10, 0), (12, 0)}


@pytest.mark.parametrize(
    "path, value, problem",
    [
        (("9.0", "gate_up", "columns"), 48, "9.0: gate_up: columns is 48, expected a power of two"),
        (("9.0", "gate_up", "columns"), None, "columns is None, expected a power of two"),
        (("9.0", "gate_up", "columns"), True, "columns is True, expected a power of two"),
        (("9.0", "gate_up", "inputs"), 0, "inputs is 0"),
        (("8.0", "down", "num_warps"), 64, "8.0: down: num_warps is 64, expected 32 at most"),
        (("8.0", "down", "num_stages"), 0, "num_stages is 0, expected 1 to 8"),
        (("8.0", "down", "depth"), 2, "8.0: down: depth is unknown; there are columns"),
        (("8.0", "down"), 2, "8.0: down: expected an object, found int"),
        (("8.0", "mla_16_bits"), {}, "8.0: mla_16_bits: expected a list of tiles"),
        (("8.0", "mla_16_bits"), [], "8.0: mla_16_bits: expected a list of tiles"),
        (("8.0", "mla_16_bits", 1, "rows"), 16, r"rows \[16, 16, 64\], expected them to ascend"),
        (("8.0", "mla_16_bits", 1, "keys"), 3, r"8.0: mla_16_bits\[1\]: keys is 3"),
        (("8.0", "router"), {}, "8.0: router is unknown; there are mla_16_bits"),
        (("sm_80",), {}, "chip 'sm_80', expected a compute capability such as '9.0'"),
    ],
)
def test_wrong_data_is_refused_by_name(path, value, problem):
    data = json.loads(TEXT)
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(TilesError, match=problem):
        tiles.loads(json.dumps(data))


def test_a_missing_field_is_named():
    data = json.loads(TEXT)
    del data["10.0"]["down"], data["10.0"]["gate_up"]
    with pytest.raises(TilesError, match="10.0: gate_up is missing, down is missing; there are"):
        tiles.loads(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "{}", "{"])
def test_other_files_are_refused(text):
    with pytest.raises(TilesError, match="nowhere.json: "):
        tiles.loads(text, "nowhere.json")


def test_writing_replaces_one_row_and_keeps_the_others(tmp_path):
    path = tmp_path / "tiles.json"
    path.write_text(TEXT)
    path.chmod(0o640)
    chip = CHIPS[9, 0]
    chip = chip._replace(down=chip.down._replace(num_warps=8))
    tiles.write(CHIPS | {(8, 9): chip, (9, 0): chip}, path)
    read = tiles.loads(path.read_text())
    assert read == dict(sorted((CHIPS | {(8, 9): chip, (9, 0): chip}).items()))
    assert path.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["tiles.json"]


def test_nothing_is_written_of_wrong_rows(tmp_path):
    path = tmp_path / "tiles.json"
    path.write_text("as it was")
    chip = CHIPS[9, 0]
    wrong = chip._replace(down=chip.down._replace(num_warps=3))
    with pytest.raises(TilesError, match="the new rows: 9.0: down: num_warps is 3"):
        tiles.write(CHIPS | {(9, 0): wrong}, path)
    assert path.read_text() == "as it was"
    assert [p.name for p in tmp_path.iterdir()] == ["tiles.json"]


def test_tiles_that_are_tried_come_before_the_chip_s_own():
    chip = CHIPS[9, 0]
    tried = chip._replace(down=chip.down._replace(num_warps=8))
    with tiles.trying(tried):
        assert tiles.chip_tiles(H100) is tried
        assert tiles.expert_tiles(H100, 4)[1].num_warps == 8
    assert tiles.chip_tiles(H100) is chip


def test_more_than_sixteen_tokens_take_tiles_of_their_own():
    chip = CHIPS[9, 0]
    assert tiles.expert_tiles(H100, 16) == (chip.gate_up, chip.down)
    assert tiles.expert_tiles(H100, 17) == (chip.gate_up_batch, chip.down_batch)
