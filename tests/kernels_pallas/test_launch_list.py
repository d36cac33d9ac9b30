"""The launch list's reader, on a small list written by hand in XLA's form."""

import re

import pytest

from kernels_pallas import launch_list
from kernels_pallas.launch_list import Launch, LaunchListError, Node


def list_of(text: str) -> str:
    """The list with each kernel's "@GRID THREADS SHARED" written out as XLA does."""

    def sizes(found: re.Match) -> str:
        grid, threads, shared = found[1].replace("x", ", "), found[2], found[3]
        return f"grid: [{grid}] threads: [{threads}, 1, 1]  shared_memory: {shared} bytes"

    return re.sub(r"@(\S+) (\d+) (\d+)", sizes, text)


# A loop of one graph: two layers, then a choice of branches; one kernel before it, one after.
ONE_GRAPH = list_of("""\
000: kCommandBuffer [source       | next=002 (1)]
    001: kCustomKernel [source | sink] before @1x1x1 1 0
002: kWhile         [prev=000 (1)| next=020 (1)]
condition:
    003: kCustomKernel [source | sink] compare @1x1x1 1 0
  body:
    000: kCommandBuffer [source | sink]
        004: kCopy         [source        | next=005 (2)] kCopy
        005: kCustomKernel [prev=004 (1) | next=006 (1)] norm @4x1x1 256 8192
        006: kCustomKernel [prev=005 (11)| next=007 (1)] product @8x32x1 64 768
        007: kAllReduce    [prev=006 (1) | next=008 (1)] kAllReduce
        008: kCustomKernel [prev=007 (1) | next=009 (1)] product @8x32x1 64 768
        009: kAllReduce    [prev=008 (1) | next=016 (1)] kAllReduce
        016: kConditional  [prev=009 (1) | sink        ]
          false_branch:
            010: kAllGather    [source       | next=011 (1)] kAllGather
            011: kCustomKernel [prev=010 (1)| next=014 (1)] filter @1x1x1 1 0
            014: kConditional  [prev=011 (1)| sink        ]
              false_branch:
                012: kCustomKernel [source | sink] sort @1x1x1 1 0
              true_branch:
                No thunks.
          true_branch:
            015: kAllGather    [source | sink] kAllGather
000: kCommandBuffer [prev=002 (1)| sink]
    020: kCustomKernel [source | sink] after @1x1x1 1 0
""")

# The same body where collectives stay outside graphs.
IN_PIECES = list_of("""\
000: kWhile [source | sink]
condition:
    001: kCustomKernel [source | sink] compare @1x1x1 1 0
  body:
    000: kCommandBuffer [source | next=004 (1)]
        002: kCustomKernel [source | next=003 (1)] norm @4x1x1 256 0
        003: kCustomKernel [prev=002 (1)| sink] product @8x1x1 64 0
    004: kAllReduce [prev=000 (1)| next=000 (1)] kAllReduce
    000: kCommandBuffer [prev=004 (1)| sink]
        005: kCustomKernel [source | sink] product @8x1x1 64 0
    006: kCustomKernel [source | sink] lonely @8x1x1 64 0
""")

METADATA = """\
thunk_metadata {
  thunk_info {
    profile_annotation: "command_buffer"
  }
  thunk_kind: "kCommandBuffer"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "norm.7"
    thunk_id: 5
  }
  thunk_kind: "kCustomKernel"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "gemm_fusion_dot.1"
    thunk_id: 6
  }
  thunk_kind: "kCustomKernel"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "psum.1"
    thunk_id: 7
  }
  thunk_kind: "kAllReduce"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "product.2"
    thunk_id: 8
  }
  thunk_kind: "kCustomKernel"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "all-reduce-start.3"
    thunk_id: 9
  }
  thunk_kind: "kAllReduce"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "conditional.4"
    thunk_id: 16
  }
  thunk_kind: "kConditional"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "all-gather-start.2"
    thunk_id: 15
  }
  thunk_kind: "kAllGather"
}
"""

PROGRAM = """\
%body (p: (s32[], bf16[4,7168])) -> (s32[], bf16[4,7168]) {
  %norm.7 = (f32[4,1], bf16[4,7168]) fusion(%p), metadata={op_name="jit(f)/layer_0/reduce_sum"}
  %gemm_fusion_dot.1 = bf16[4,7168]{1,0} fusion(%norm.7), kind=kCustom, calls=%gemm
  %psum.1 = bf16[1,4,7168]{2,1,0} all-reduce(%a), metadata={op_name="jit(f)/layer_0/mla/psum"}
  %product.2 = bf16[4,7168]{1,0} fusion(%b), metadata={op_name="jit(f)/layer_12/moe/dot"}
  %all-reduce-start.3 = f32[4,7168] all-reduce-start(%c), metadata={op_name="layer_12/moe/psum"}
  %conditional.4 = s32[4]{0} conditional(%q, %a, %b), metadata={op_name="jit(f)/choose/cond"}
  ROOT %all-gather-start.2 = (s32[4,2]{1,0}, s32[32,2]{1,0}) all-gather-start(%x), dimensions={0}
}
"""


def read(text: str, *, is_loop: bool = True) -> launch_list.Launches:
    names = launch_list.read_metadata(METADATA)
    program = launch_list.read_program(PROGRAM, names.values())
    nodes = launch_list.annotate(launch_list.parse(text), names, program)
    return launch_list.launches_of(nodes, is_loop=is_loop)


def test_the_body_is_one_graph_and_the_loop_stays_apart():
    launches = read(ONE_GRAPH)
    assert [x.name for x in launches.kernels] == ["norm", "product", "product"]
    assert launches.graphs == 1 and launches.outside_graphs == ()
    around = launch_list.count_kinds(launches.around)
    assert around == {"kCustomKernel": 3, "kWhile": 1}
    assert [x.name for x in launches.around if x.is_kernel] == ["before", "compare", "after"]


def test_a_kernel_has_its_sizes():
    product = read(ONE_GRAPH).kernels[1]
    assert (product.grid, product.threads, product.shared_bytes) == ((8, 32, 1), 64, 768)


def test_of_a_conditional_one_branch_counts():
    launches = read(ONE_GRAPH)
    [gather] = launches.all_gathers
    # Operands first: what is gathered is the second half.
    assert gather.number == 15 and gather.num_bytes == 32 * 2 * 4
    assert launch_list.count_kinds(launches.cycle)["kConditional"] == 1


def test_where_scopes_tell_the_branch_whose_condition_does_not_hold_counts():
    text = """\
000: kConditional [source | sink]
  false_branch:
    001: kCopy [source | next=002 (1)] kCopy
    002: kCopy [prev=001 (1)| sink] kCopy
  true_branch:
    003: kCopy [source | sink] kCopy
"""
    program = {
        "if": launch_list.Instruction("jit(f)/choose/cond", 4),
        "a": launch_list.Instruction("jit(f)/choose/cond/branch_0_fun/argmax", 4),
        "b": launch_list.Instruction("jit(f)/choose/cond/branch_1_fun/mul", 4),
    }
    names = {0: "if", 1: "a", 3: "b"}
    nodes = launch_list.annotate(launch_list.parse(text), names, program)
    taken = launch_list.launches_of(nodes, is_loop=False).cycle
    assert [x.number for x in taken] == [0, 1, 2]


def test_collectives_know_their_bytes():
    reduces = read(ONE_GRAPH).all_reduces
    assert [x.num_bytes for x in reduces] == [4 * 7168 * 2, 4 * 7168 * 4]


def test_launches_belong_to_layers_by_scope_and_without_one_to_the_layer_before():
    layers = read(ONE_GRAPH).by_layer()
    assert {layer: [x.number for x in each] for layer, each in layers.items()} == {
        0: [5, 6, 7],
        12: [8, 9],
    }


def test_pieces_are_counted_and_what_lies_between_is_outside():
    launches = read(IN_PIECES)
    assert launches.graphs == 2
    assert [x.number for x in launches.outside_graphs] == [4, 6]
    assert len(launches.kernels) == 4


def test_without_a_loop_in_question_everything_is_one_pass():
    launches = read(IN_PIECES, is_loop=False)
    assert launches.around == () and len(launches.kernels) == 5
    assert launches.cycle[0].kind == "kWhile"


def test_an_asynchronous_all_reduce_counts_once():
    text = """\
003: kAsyncStart [source | next=007 (3)] stream=computation_stream[0], async_id=3
    004: kCollectiveKernel [source | sink] kCollectiveKernel
006: kAsyncDone [source | sink] async_id=3
"""
    launches = launch_list.launches_of(launch_list.parse(text), is_loop=False)
    assert [x.number for x in launches.cycle] == [4]
    assert [x.number for x in launches.all_reduces] == [4]


def test_a_loop_inside_a_graph():
    text = list_of("""\
000: kCommandBuffer [source | sink]
    001: kWhile [source | sink]
    condition:
        002: kCustomKernel [source | sink] compare @1x1x1 1 0
      body:
        003: kWhile [source | sink]
        condition:
            004: kCopy [source | sink] kCopy
          body:
            005: kCustomKernel [source | sink] inner @1x1x1 1 0
        006: kCustomKernel [source | sink] outer @1x1x1 1 0
""")
    launches = launch_list.launches_of(launch_list.parse(text), is_loop=True)
    assert [x.name for x in launches.kernels] == ["inner", "outer"]
    assert launches.graphs == 1 and launches.outside_graphs == ()


def test_the_tree_of_a_list():
    [node] = launch_list.parse("007: kCopy [source | sink] kCopy\n")
    assert node == Node(Launch("kCopy", number=7))


@pytest.mark.parametrize(
    "text",
    ["something else", "  body:", "000: kCopy [a | b] kCopy\n  true_branch:"],
)
def test_a_list_in_another_form_is_refused(text):
    with pytest.raises(LaunchListError):
        launch_list.parse(text)


def test_a_kernel_without_sizes_is_refused():
    with pytest.raises(LaunchListError, match="sizes"):
        launch_list.parse("000: kCustomKernel [a | b] name")


def test_a_program_without_a_loop_is_refused():
    with pytest.raises(LaunchListError, match="no loop"):
        launch_list.launches_of(launch_list.parse("007: kCopy [a | b] kCopy"), is_loop=True)
