"""Instructions of compiled programs, and the operations that they belong to."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from rollmill.core.operations import operation_scope
from rollmill.profiling.hlo import module_name, program_number, read_instructions
from rollmill.profiling.hlo_text import operations_in

SMALL = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8,16]{1,0})->f32[8,4]{1,0}}

%fused_computation (param_0: f32[8,4]) -> f32[8,4] {
  %param_0 = f32[8,4]{1,0} parameter(0)
  %tanh.1 = f32[8,4]{1,0} tanh(%param_0), metadata={op_name="jit(f)/operation:collect/operation:policy/tanh"}
  %add.1 = f32[8,4]{1,0} add(%tanh.1, %tanh.1), metadata={op_name="jit(f)/operation:collect/operation:policy/add"}
  ROOT %mul.1 = f32[8,4]{1,0} multiply(%add.1, %add.1), metadata={op_name="jit(f)/operation:learn/mul"}
}

%body (arg: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %arg = (s32[], f32[8,4]{1,0}) parameter(0)
  %inner = f32[8,4]{1,0} get-tuple-element(%arg), index=1
  %copy.1 = f32[8,4]{1,0} copy(%inner)
  ROOT %out = (s32[], f32[8,4]{1,0}) tuple(%copy.1)
}

%condition (arg.1: (s32[], f32[8,4])) -> pred[] {
  %arg.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%arg.1, %arg.1), direction=LT
}

ENTRY %main.1 (x: f32[8,16]) -> f32[8,4] {
  %x = f32[8,16]{1,0} parameter(0)
  %weights = f32[16,4]{1,0} constant({...})
  %dot.1 = f32[8,4]{1,0} dot(%x, %weights), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/operation:learn/vmap(operation:gradients)/dot_general"}
  %fusion.1 = f32[8,4]{1,0} fusion(%dot.1), kind=kLoop, calls=%fused_computation
  %tuple.1 = (s32[], f32[8,4]{1,0}) tuple(%fusion.1)
  %while.1 = (s32[], f32[8,4]{1,0}) while(%tuple.1), condition=%condition, body=%body, \
metadata={op_name="jit(f)/operation:collect/while"}
  %mean = f32[8,4]{1,0} all-reduce(%fusion.1), to_apply=%condition
  ROOT %result = f32[8,4]{1,0} get-tuple-element(%while.1), index=1
}
"""


@pytest.mark.parametrize(
    ("op_name", "path"),
    [
        ("jit(f)/operation:collect/while/body/vmap(operation:policy)/dot_general", ("collect", "policy")),
        (
            "jit(f)/operation:learn/transpose(jvp(operation:gradients))/operation:gradients/mul",
            ("learn", "gradients"),
        ),
        (
            "jit(f)/operation:learn/operation:update/mul;jit(f)/operation:learn/operation:update/neg",
            ("learn", "update"),
        ),
        ("jit(f)/vmap()/environment/add", ()),
        ("", ()),
    ],
)
def test_operations_are_read_from_names_of_scopes(op_name, path):
    assert operations_in(op_name) == path


def test_instructions_have_the_operation_of_their_scope_or_of_the_loop_around_them():
    read = read_instructions(SMALL)
    assert module_name(SMALL) == "jit_f"
    assert read["dot.1"].shares == {("learn", "gradients"): 1.0}
    assert read["while.1"].kind == "container" and read["while.1"].shares == {("collect",): 1.0}
    assert read["copy.1"].kind == "copy" and read["copy.1"].shares == {("collect",): 1.0}
    assert read["mean"].kind == "collective"
    assert "x" not in read and "tuple.1" not in read and "tanh.1" not in read


def test_a_fusion_is_divided_by_the_cost_of_its_parts():
    shares = read_instructions(SMALL)["fusion.1"].shares
    assert shares == {("collect", "policy"): pytest.approx(2 / 3), ("learn",): pytest.approx(1 / 3)}


def test_costs_are_those_of_shapes():
    read = read_instructions(SMALL)
    assert read["dot.1"].flops == 2 * 8 * 4 * 16
    assert read["dot.1"].bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert read["fusion.1"].flops == 3 * 8 * 4
    assert read["while.1"].flops == 0


def test_a_compiled_program_is_read():
    def step(x, _):
        with operation_scope("policy"):
            x = jnp.tanh(x @ x)
        with operation_scope("environment"):
            return jnp.sort(x, axis=0) + 1.0, None

    compiled = jax.jit(lambda x: jax.lax.scan(step, x, None, length=5)[0]).lower(jnp.ones((32, 32))).compile()
    read = read_instructions(compiled.as_text())
    products = [each for each in read.values() if each.flops >= 2 * 32**3]
    assert products and all(each.shares.keys() == {("policy",)} for each in products)
    assert any(("environment",) in each.shares for each in read.values())
    assert all(sum(each.shares.values()) == pytest.approx(1.0) for each in read.values())


def test_a_program_s_number_is_read_past_fields_of_any_kind():
    name, long_field = b"\x0a\x02ab", b"\x1a\xac\x02" + b"\x28" * 300
    fixed = b"\x11" + b"\x28" * 8 + b"\x15" + b"\x28" * 4
    assert program_number(name + long_field + fixed + b"\x30\x06\x28\x96\x01") == 150
    assert program_number(name) == 0


def test_compiled_programs_have_different_numbers():
    compiled = [jax.jit(lambda x: x + 1).lower(jnp.ones(size)).compile() for size in (3, 4)]
    modules = [each.runtime_executable().hlo_modules()[0] for each in compiled]
    assert len({program_number(module.as_serialized_hlo_module_proto()) for module in modules}) == 2


LIBRARY_CALLS = """HloModule jit_f, is_scheduled=true

ENTRY %main (a: f32[64,32], b: f32[32,16], x: f32[8,16,16,3], k: f32[5,5,3,32]) -> f32[64,16] {
  %a = f32[64,32]{1,0} parameter(0)
  %b = f32[32,16]{1,0} parameter(1)
  %x = f32[8,16,16,3]{3,2,1,0} parameter(2)
  %k = f32[5,5,3,32]{3,2,1,0} parameter(3)
  %gemm = (f32[64,16]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %cudnn = (f32[8,16,16,32]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=5x5 pad=2_2x2_2}, \
dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward"
  %backward = (f32[8,16,16,3]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=5x5 pad=2_2x2_2}, \
dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardFilter"
  ROOT %sort = f32[64,16]{1,0} custom-call(%a), custom_call_target="sort"
}
"""


def test_calls_of_libraries_count_the_products_that_they_sum():
    flops = {name: each.flops for name, each in read_instructions(LIBRARY_CALLS).items()}
    assert (flops["gemm"], flops["cudnn"]) == (2.0 * 64 * 16 * 32, 2.0 * 8 * 16 * 16 * 32 * (5 * 5 * 3))
    assert (flops["backward"], flops["sort"]) == (0.0, 0.0), "unknown"


def test_a_convolution_counts_its_kernel_for_each_element():
    images, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 4))
    convolve = partial(jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
    layouts = ("NHWC", "HWIO", "NHWC")
    program = jax.jit(partial(convolve, dimension_numbers=layouts)).lower(images, kernel).compile()
    assert sum(each.flops for each in read_instructions(program.as_text()).values()) == 2.0 * 2 * 8 * 8 * 4 * 27


def test_what_moves_data_counts_no_operation_and_only_the_bytes_that_it_moves():
    """A loop that reads a row of a table in each turn, and writes one of its results."""

    def turn(x, index, table):
        with operation_scope("environment"):
            x = jnp.sin(x) * 1.5 + table[index]
        return x, x

    def run(x, table):
        return jax.lax.scan(partial(turn, table=table), x, jnp.arange(512))

    program = jax.jit(run).lower(jnp.zeros(1024), jnp.zeros((600, 1024))).compile()
    kernels = [each for each in read_instructions(program.as_text()).values() if each.kind == "kernel"]
    row, buffer = 4 * 1024, 4 * 512 * 1024
    assert sum(each.flops for each in kernels) == 3 * 1024, "sine, product, sum"
    assert sum(each.flops for each in kernels if ("environment",) in each.shares) == 3 * 1024
    in_loop = [each.bytes for each in kernels if row <= each.bytes < buffer]
    assert sum(in_loop) == pytest.approx((3 + 2) * row, rel=0.2), "reads a row and the state, writes both"


MOVING = """HloModule jit_f, is_scheduled=true

%replace (buffer: f32[512,64], row: f32[1,64], at: s32[]) -> f32[512,64] {
  %buffer = f32[512,64]{1,0} parameter(0)
  %at = s32[] parameter(2)
  %row = f32[1,64]{1,0} parameter(1)
  %tanh = f32[1,64]{1,0} tanh(%row), metadata={op_name="jit(f)/operation:policy/tanh"}
  ROOT %replaced = f32[512,64]{1,0} dynamic-update-slice(%buffer, %tanh, %at, %at), \
metadata={op_name="jit(f)/operation:collect/dynamic_update_slice"}
}

%pick (table: f32[512,64], indices: s32[32,1]) -> f32[32,64] {
  %table = f32[512,64]{1,0} parameter(0)
  %rows = s32[32,1]{1,0} parameter(1)
  %same = f32[512,64]{1,0} bitcast(%table)
  ROOT %picked = f32[32,64]{1,0} gather(%same, %rows), slice_sizes={1,64}
}

ENTRY %main (a: f32[512,64], b: f32[1,64], c: s32[], d: s32[32,1], e: f32[32,64]) -> f32[512,64] {
  %a = f32[512,64]{1,0} parameter(0)
  %b = f32[1,64]{1,0} parameter(1)
  %c = s32[] parameter(2)
  %d = s32[32,1]{1,0} parameter(3)
  %e = f32[32,64]{1,0} parameter(4)
  %replacing = f32[512,64]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%replace
  %picking = f32[32,64]{1,0} fusion(%replacing, %d), kind=kLoop, calls=%pick
  %filled = f32[512,64]{1,0} broadcast(%c), dimensions={}
  ROOT %added = f32[512,64]{1,0} scatter(%filled, %d, %picking), to_apply=%replace
}
"""


def test_of_a_buffer_the_part_counts_that_is_picked_or_replaced():
    read = read_instructions(MOVING)
    row = 4 * 64
    assert read["replacing"].bytes == 2 * row + 4
    assert read["replacing"].flops == 64
    assert read["replacing"].shares == {("policy",): 0.5, ("collect",): 0.5}
    assert read["picking"].bytes == 2 * 32 * row + 4 * 32
    assert read["picking"].flops == read["filled"].flops == 0.0
    assert read["added"].bytes == 2 * 32 * row + 4 * 32
    assert read["added"].flops == 32 * 64
