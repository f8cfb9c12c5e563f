"""Functions put together at random from what environments do, against the same functions under `vmap`.

Floats hold small whole numbers, on which arithmetic is exact, so that results are equal and not only near; or NaN,
infinities, zeros of both signs and the like.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from code_runs import evaluate_by_code
from fused_runs import assert_same, both
from hypothesis import given, settings, strategies as st

E, N = 6, 4

lax = jax.lax


def held(x):
    return jnp.clip(x, -50.0, 50.0)


def scanned(x, n):
    return held(lax.scan(lambda c, v: (jnp.where(v[0] > c, c + 1.0, c - v[0]), c), x[0], (x, n))[1])


def repeated(x, n):
    return held(lax.fori_loop(0, n[0] % 4, lambda t, c: held(c + jnp.flip(c) - t.astype(jnp.float32)), x))


def searched(x, n):
    return (
        lax.while_loop(lambda c: (c < 6) & (x[c % N] != n[0].astype(jnp.float32)), lambda c: c + 1, jnp.int32(0))
        + n
    )


F, I, B = "floats", "integers", "booleans"  # noqa: E741
OPERATIONS = [
    (F, (F, F), lambda x, y: held(x + y)),
    (F, (F, F), lambda x, y: held(x * y)),
    (F, (F, F), lambda x, y: jnp.maximum(x, -y)),
    (F, (F,), lambda x: jnp.floor(x / 2.0)),
    (F, (F,), lambda x: held(jnp.cumsum(x))),
    (F, (F,), lambda x: jnp.sort(x)[::-1]),
    (F, (F,), lambda x: jnp.concatenate([x[1:], x[:1]])),
    (F, (F,), lambda x: held(x.reshape(2, 2).T.reshape(-1) - x.sum())),
    (F, (F, F), lambda x, y: held(jnp.outer(x, y)[1] + jnp.dot(x, y))),
    (F, (F, I), lambda x, n: x[n % N]),
    (F, (F, I), lambda x, n: x.at[n % N].add(1.0)),
    (F, (F, I), lambda x, n: x.at[n[0]].set(7.0)),
    (F, (F, I), lambda x, n: lax.dynamic_slice(jnp.concatenate([x, -x]), (n[0],), (N,))),
    (F, (F, I), lambda x, n: lax.switch(n[0] % 3, [lambda v: v, jnp.flip, lambda v: held(v + 1.0)], x)),
    (F, (F, B), lambda x, b: lax.cond(b[0], lambda v: held(v * 2.0), lambda v: v - v.min(), x)),
    (F, (B, F, F), lambda b, x, y: jnp.where(b, x, y)),
    (F, (F, I), scanned),
    (F, (F, I), repeated),
    (F, (I,), lambda n: (n % 10).astype(jnp.float32)),
    (I, (F,), lambda x: x.astype(jnp.int32)),
    (I, (I, I), lambda n, m: n * 3 + m),
    (I, (I, I), lambda n, m: (n ^ m) >> 1),
    (I, (I,), lambda n: n % 7 - n // 3),
    (I, (F,), lambda x: jnp.argsort(x)),
    (I, (F,), lambda x: jnp.argmax(x) + jnp.arange(N)),
    (I, (B, I), lambda b, n: jnp.where(b, n, jnp.sum(b))),
    (I, (F, I), searched),
    (I, (I,), lambda n: jax.random.randint(jax.random.fold_in(jax.random.key(1), n[0]), (N,), -5, 20)),
    (B, (F, F), lambda x, y: x > y),
    (B, (I, I), lambda n, m: (n == m) | (n < 0)),
    (B, (B, B), lambda b, c: b ^ ~c),
    (B, (F,), lambda x: jnp.any(x > 0) & (x != 0)),
]

INSTRUCTIONS = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.tuples(*[st.integers(0, 5)] * 3)), min_size=3, max_size=9
)


def assembled(instructions):
    """Each instruction takes values that are there, and adds one."""

    def function(x, n, b):
        values = {F: [x], I: [n], B: [b]}
        for (kind, kinds, operation), picks in instructions:
            operands = [values[own][pick % len(values[own])] for own, pick in zip(kinds, picks, strict=False)]
            values[kind].append(operation(*operands))
        return values

    return function


@settings(max_examples=12, deadline=None, derandomize=True)
@given(instructions=INSTRUCTIONS, seed=st.integers(0, 100))
@pytest.mark.slow
def test_functions_at_random(instructions, seed):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.integers(-6, 7, size=(E, N)), jnp.float32)
    n = jnp.asarray(rng.integers(-9, 10, size=(E, N)), jnp.int32)
    b = jnp.asarray(rng.random((E, N)) < 0.5)
    assert_same(*both(assembled(instructions), (x, n, b)), rtol=0, atol=0)


EDGES = st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0, 2.5, -0.5, 2.0**31, -(2.0**31), 300.0])
LIMITS = st.sampled_from([0, 1, -1, 7, 31, 32, 33, 2**31 - 1, -(2**31), -9])


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    instructions=INSTRUCTIONS,
    floats=st.lists(EDGES, min_size=E * N, max_size=E * N),
    integers=st.lists(LIMITS, min_size=E * N, max_size=E * N),
    booleans=st.lists(st.booleans(), min_size=E * N, max_size=E * N),
)
@pytest.mark.slow
def test_functions_at_random_on_edges(instructions, floats, integers, booleans):
    x = jnp.asarray(floats, jnp.float32).reshape(E, N)
    n = jnp.asarray(integers, jnp.int32).reshape(E, N)
    b = jnp.asarray(booleans).reshape(E, N)
    assert_same(*both(assembled(instructions), (x, n, b)), rtol=0, atol=0)
    assert_same(*both(assembled(instructions), (x, n, b), evaluate=evaluate_by_code), rtol=0, atol=0)
