"""The mutants: what is changed, and the test that must notice. See mutations.py."""

import test_attention
import test_blocks
import test_formats
import test_golden
import test_hadamard
import test_linear
import test_public_faults as faults
import test_public_faults_layout as layout_faults
import test_public_faults_training as training
import test_quantize
import test_random
import test_rounding
import test_tensor
from mutations import Check, Mutation, mutate

from fp4repro import FP8, NVFP4

DESCRIBED = test_golden.test_described_cases_equal_the_oracle
ROW = (1, 16)
TIES, GAUSS = Check(DESCRIBED, ("ties", ROW)), Check(DESCRIBED, ("gauss", ROW))
SCALE_TIES = Check(DESCRIBED, ("scaleties", ROW))
SOFTWARE_FORM = Check(test_rounding.test_stochastic_equals_the_software_form_for_every_byte, (False,))
UNQUANTISED = test_attention.test_without_quantisers_it_is_attention
LINEAR = Check(test_linear.test_equals_float64_product_of_dequantised_operands)
STREAMS = Check(training.test_B2_a_real_pass_uses_every_stream_once)
ROLES = Check(training.test_B4_stochastic_rounding_of_dy_alone_and_switched_by_the_recipe)

NEAREST, SCALES, APPLY = "core.rounding:round_nearest", "core.kernels:make_scales", "core.kernels:make_apply"
ROUNDED = "core.kernels:rounded"
STEP = "g = c * 2.0 ** (fmt.mantissa_bits - 23)"
UNPACKED = "wide & 0xF | (wide & 0xF0) << 4"
EXCHANGED = '{"x_fprop": "w_fprop", "w_fprop": "x_fprop"}.get(name, name)'
CLAMPED = "wanted.clamp_max(fmt.scale.max)"

ELEMENTS = [
    mutate(
        "ties away from zero",
        TIES,
        NEAREST,
        ("return (a + c).sub_(c)", f"{STEP}; return torch.floor(a / g + 0.5) * g"),
    ),
    mutate(
        "ties towards zero",
        TIES,
        NEAREST,
        ("return (a + c).sub_(c)", f"{STEP}; return torch.ceil(a / g - 0.5) * g"),
    ),
    mutate(
        "carry into the next binade lost",
        GAUSS,
        NEAREST,
        ("return (a + c).sub_(c)", "r = (a + c) - c; return torch.where((a < 2) & (r == 2), 1.5, r)"),
    ),
    mutate(
        "scaled values rounded to BF16 first",
        TIES,
        ROUNDED,
        ("y = x * e", "y = (x * e).bfloat16().float()"),
    ),
    mutate(
        "elements above 6 not saturated",
        Check(DESCRIBED, ("scaleunderflow", ROW)),
        ROUNDED,
        ("y.abs().clamp_max_(fmt.element.max)", "y.abs()"),
    ),
    mutate(
        "signs of elements lost",
        Check(test_quantize.test_the_three_outputs_agree, (ROW, "nearest")),
        "core.kernels:signed",
        ("a.mul_(y.sign_())", "a"),
    ),
    mutate(
        "sign of zero from the sign bit",
        Check(DESCRIBED, ("zeroblock", ROW)),
        APPLY,
        ("y < 0", "torch.signbit(y)"),
    ),
    mutate(
        "amax without the magnitude",
        Check(faults.test_A10_the_magnitude_counts_and_not_the_maximum, (NVFP4,)),
        "core.kernels:make_amax",
        ("x.float().abs().amax(-1, keepdim=True)", "x.float().amax(-1, keepdim=True)"),
    ),
]

BLOCK_SCALES = [
    mutate("scales truncated", SCALE_TIES, SCALES, ("ROUND[fmt.scale_rounding]", 'ROUND["down"]')),
    mutate("scales rounded up", SCALE_TIES, SCALES, ("ROUND[fmt.scale_rounding]", 'ROUND["up"]')),
    mutate(
        "scales rounded twice, through FP16",
        Check(faults.test_A8_scales_are_rounded_once_and_to_nearest),
        SCALES,
        (f"round_scale({CLAMPED}", f"round_scale({CLAMPED}.half().float()"),
    ),
    mutate(
        "elements divided by the scale before its rounding",
        Check(faults.test_A7_elements_are_divided_by_the_scale_that_is_stored),
        SCALES,
        ("step = s *", "step = wanted *"),
    ),
    mutate(
        "order of operations of Transformer Engine 2.13",
        SCALE_TIES,
        SCALES,
        ('te = fmt.order == "te"', "te = False"),
    ),
    mutate(
        "block scales clamped from below",
        Check(faults.test_A4_small_blocks_are_lost_only_below_the_scale_s_range),
        SCALES,
        (CLAMPED, "wanted.clamp(2.0**-6, fmt.scale.max)"),
    ),
    mutate(
        "a scale of one for zero blocks",
        Check(faults.test_A1_no_nan_bytes_in_scales, (NVFP4,)),
        SCALES,
        ("if fmt.scale is FP32:", "if True:"),
    ),
    mutate(
        "scales not clamped to 448",
        Check(faults.test_A2_scales_above_448_saturate_whatever_the_cast_does),
        SCALES,
        (CLAMPED, "wanted"),
    ),
    mutate(
        "E4M3 overflows to NaN",
        Check(faults.test_A1_no_nan_bytes_in_scales, (NVFP4,)),
        "core.tensor:store_scales",
        ("s.to(dtype)", "torch.where(s >= 448, torch.nan, s).to(dtype)"),
    ),
    mutate(
        "MX scales rounded to nearest",
        Check(test_quantize.test_formats_of_power_of_two_scales, ("wide_blocks", "mxfp4")),
        SCALES,
        ("ROUND[fmt.scale_rounding]", 'ROUND["nearest"]'),
    ),
    mutate(
        "four over six takes the larger error",
        Check(test_formats.test_four_over_six, ("mae", 0)),
        "core.quantize:_choose_four_or_six",
        ("four_error < six_error", "four_error > six_error"),
    ),
]

TENSOR_SCALE = [
    mutate(
        "no tensor scale",
        Check(faults.test_A6_the_tensor_scale_is_applied_and_once),
        "core.kernels:tensor_scales",
        ("if fmt.tensor_scale:", "if False:"),
    ),
    mutate(
        "tensor scale applied twice",
        Check(test_quantize.test_the_three_outputs_agree, (ROW, "nearest")),
        APPLY,
        (".mul_(decode)", ".mul_(decode).mul_(decode)"),
    ),
    mutate(
        "6 x 256 in place of 6 x 448",
        GAUSS,
        "core.kernels:tensor_scales",
        ("fmt.scale_target * fmt.target", "256.0 * fmt.target"),
    ),
    mutate(
        "amax clamped from below",
        Check(faults.test_A4_small_blocks_are_lost_only_below_the_scale_s_range),
        "core.kernels:tensor_scales",
        ("/ amax)", "/ amax.clamp_min(1e-8))"),
    ),
    mutate(
        "reciprocal and product in place of a division",
        Check(test_quantize.test_the_tensor_scales_of_many_amaxes),
        "core.kernels:tensor_scales",
        ("fmt.scale_target * fmt.target) / amax)", "fmt.scale_target * fmt.target) * (one / amax))"),
    ),
    mutate(
        "the amax of the shard and not of the whole",
        Check(layout_faults.test_G1_shards_share_the_largest_amax, (False,)),
        "core.quantize:prepare",
        ("if amax is None else", "if True else"),
    ),
    mutate(
        "NaN hidden by the maximum",
        Check(test_blocks.test_nonfinite_values_are_refused, ("quantize", NVFP4, float("nan"))),
        "core.kernels:make_amax",
        ("x.float().abs().amax(-1, keepdim=True)", "x.float().abs().nan_to_num(0).amax(-1, keepdim=True)"),
    ),
    mutate(
        "an infinity saturates where poison was asked for",
        Check(
            test_blocks.test_nonfinite_values_poison_the_tensor_on_request,
            (NVFP4, "nearest", float("inf")),
        ),
        "core.kernels:tensor_scales",
        ("torch.where(amax.isfinite(), one / encode, torch.nan)", "one / encode"),
    ),
]

STOCHASTIC = [
    mutate(
        "random bits over 255",
        SOFTWARE_FORM,
        "core.rounding:round_stochastic",
        ("2.0**-bits", "(1 / (2.0**bits - 1))"),
    ),
    mutate(
        "noise of half a step either way, then nearest",
        SOFTWARE_FORM,
        "core.rounding:round_stochastic",
        ("a + fraction * spacing", "a + fraction * spacing * 0.5"),
    ),
    mutate(
        "the stochastic rounder returns zeros",
        Check(training.test_B1_gradients_are_not_zero_and_point_the_right_way),
        "core.rounding:round_stochastic",
        ("return _floor(", "return 0 * _floor("),
    ),
    mutate(
        "stochastic rounding silently off",
        ROLES,
        "layers.operands:Slot._rounding",
        ('"stochastic" if self.stochastic else "nearest"', '"nearest"'),
    ),
    mutate(
        "stochastic rounding of weights",
        ROLES,
        "layers.operands:Slot.of",
        ("name in recipe.stochastic", 'name in (*recipe.stochastic, "w_fprop")'),
    ),
    mutate(
        "one random stream for both copies of dy",
        STREAMS,
        "layers.operands:Slot._keyed",
        ("role=self.role", "role=0"),
    ),
    mutate("key without the step", STREAMS, "layers.linear:Plan.key", ("clock.step", "0")),
    mutate("key without the layer", STREAMS, "layers.linear:Plan.key", ("self.layer", "0")),
    mutate(
        "key without the microbatch",
        STREAMS,
        "layers.linear:Plan.key",
        ("microbatch=clock.microbatch", "microbatch=0"),
    ),
    mutate(
        "four elements share a byte",
        Check(test_random.test_fields_are_cut_from_the_lowest_bits_up),
        "core.random:fields_of",
        (
            "words.view(_FIELDS[bits])[:count]",
            "words.view(_FIELDS[bits])[:: 32 // bits].repeat_interleave(32 // bits)[:count]",
        ),
    ),
    mutate(
        "half of the key unused",
        Check(test_random.test_either_word_of_the_key_changes_the_stream_by_itself),
        "core.random:hash_index",
        ("h = h + words[1]", "h = h + 0"),
    ),
]

TRANSFORM = [
    mutate(
        "no sign vector",
        Check(test_hadamard.test_the_signs_are_those_of_transformer_engine),
        "core.hadamard:sign_vector",
        ('if signs == "te":', 'if signs == "never":'),
        # Made anew, since the matrix with the signs is cached.
        also=(("core.hadamard:hadamard_matrix", ("vector[:, None]", "vector[:, None].clone()")),),
    ),
    mutate(
        "no normalisation",
        Check(test_hadamard.test_entries_of_size_16_are_exact_in_bf16),
        "core.hadamard:hadamard_matrix",
        ("* h * size**-0.5", "* h"),
    ),
    mutate(
        "signs on one operand only",
        Check(training.test_C1_both_operands_of_wgrad_share_their_signs, ("te",)),
        "layers.operands:Slot.transform",
        ("self.hadamard_signs, drawn,", '"none" if self.role == 5 else "te", drawn,'),
    ),
    mutate(
        "each operand draws signs of its own",
        Check(training.test_C1_both_operands_of_wgrad_share_their_signs, ("drawn",)),
        "layers.operands:Slot.transform",
        ("role=100 + self.axis_role", "role=100 + self.role"),
    ),
    mutate(
        "amax from before the transform",
        LINEAR,
        "layers.operands:Slot.store",
        ("x = self.transform(x, key)", "own = x.abs().amax(); x = self.transform(x, key)"),
        ('nonfinite="poison")', 'nonfinite="poison", amax=own)'),
    ),
    mutate(
        "transform not rounded to BF16",
        LINEAR,
        "layers.operands:Slot.transform",
        ("dtype=torch.bfloat16", "dtype=torch.float32"),
    ),
    mutate(
        "transform along features",
        LINEAR,
        "layers.operands:Slot.transform",
        ("drawn, self.axis,", "drawn, 1 - self.axis,"),
    ),
]

LAYOUT = [
    mutate(
        "nibbles swapped",
        Check(layout_faults.test_I2_nibbles_and_the_number_of_bytes),
        "core.kernels:make_pack",
        ("words | words >> 4", "words << 4 | words >> 8"),
    ),
    mutate(
        "nibbles swapped in packing and unpacking alike",
        Check(layout_faults.test_I2_nibbles_and_the_number_of_bytes),
        "core.kernels:make_pack",
        ("words | words >> 4", "words << 4 | words >> 8"),
        also=(("core.kernels:make_unpack", (UNPACKED, "wide >> 4 | (wide & 0xF) << 8")),),
    ),
    mutate(
        "half of K multiplied",
        Check(layout_faults.test_I2_nibbles_and_the_number_of_bytes),
        "core.products:matmul",
        ("left.reshape(-1, a.shape[-1]), right.T", "left.reshape(-1, a.shape[-1])[:, ::2], right.T[::2]"),
    ),
    mutate(
        "scales not transposed",
        Check(test_tensor.test_the_transpose_is_that_of_the_quantised_transpose, ((48, 64),)),
        "core.layout:transpose",
        ("scales = scales.T\n", "scales = scales.reshape(scales.T.shape)\n"),
    ),
    mutate(
        "bytes transposed in place of nibbles",
        Check(test_tensor.test_the_transpose_is_that_of_the_quantised_transpose, ((48, 64),)),
        "core.layout:transpose",
        (
            "unpack(q.codes, q.format).T.contiguous()",
            "unpack(q.codes.T.repeat_interleave(2, 0)[:, ::2].contiguous(), q.format)",
        ),
    ),
    mutate(
        "swizzle of (32, 4) in place of (4, 32), and its inverse alike",
        Check(layout_faults.test_D2_swizzle_against_the_formula_and_not_its_inverse, ((256, 12),)),
        "core.layout:swizzle_scales",
        ("4, 32, wide // 4, 4)", "32, 4, wide // 4, 4)"),
        ("permute(0, 3, 2, 1, 4)", "permute(0, 3, 1, 2, 4)"),
        also=(("core.layout:unswizzle_scales", ("permute(0, 3, 2, 1, 4)", "permute(0, 2, 3, 1, 4)")),),
    ),
    mutate(
        "padding of scales not zeroed",
        Check(layout_faults.test_D1_padding_is_zero_whatever_memory_held, (17,)),
        "core.layout:swizzle_scales",
        ("(0, wide - columns, 0, high - rows))", "(0, wide - columns, 0, high - rows), value=0x7F)"),
    ),
    mutate(
        "blocks filled with something else than zeros",
        Check(layout_faults.test_D5_a_side_works_as_if_padded_or_is_refused, (FP8, 100)),
        "core.blocks:Blocks.matrix",
        ("0, high - self.high))", "0, high - self.high), value=100.0)"),
    ),
]

LAYER = [
    mutate(
        "x and W quantised by each other's rule",
        LINEAR,
        "layers.operands:Slot.of",
        ("getattr(recipe, name)", f"getattr(recipe, {EXCHANGED})"),
    ),
    mutate(
        "wgrad from the row-wise copies",
        LINEAR,
        "layers.operands:Slot.of",
        ("name in _UPRIGHT:", 'name == "w_dgrad":'),
    ),
    mutate(
        "tensor scale of W forgotten in dgrad",
        LINEAR,
        "layers.linear:_QuantLinear.backward",
        ("dy_scale * w_scale", "dy_scale"),
    ),
    mutate(
        "tensor scales applied after the rounding to BF16",
        Check(test_linear.test_bf16_output_is_rounded_once),
        "core.products:product",
        ("beta=0, alpha=factor, out=out)", "beta=0, out=out).mul_(factor)"),
    ),
    mutate(
        "stale quantised weight",
        Check(training.test_F2_a_changed_weight_is_quantised_anew, ("whole",)),
        "layers.linear:QuantLinear.quantised_weight",
        ('if not cache or not _same(cache["state"], state):', "if not cache:"),
    ),
    mutate(
        "tokens padded with ones",
        Check(test_linear.test_any_number_of_tokens, (7,)),
        "layers.linear:_whole_tokens",
        ("(0, 0, 0, missing))", "(0, 0, 0, missing), value=1.0)"),
    ),
    mutate(
        "first block of the rule quantised after all",
        Check(training.test_F5_the_layers_in_bf16_are_named_and_counted),
        "recipes.recipe:KeepBF16.blocks",
        ("if i < first or", "if i < first - 1 or"),
    ),
]

ATTENTION = [
    mutate(
        "P not rounded to BF16",
        Check(test_attention.test_p_is_rounded_to_bf16_for_its_two_products),
        "attention.passes:Work._tile",
        ("return compiled(_rounding)(x), 1.0", "return x, 1.0"),
    ),
    mutate(
        "row term of dS forgotten",
        Check(UNQUANTISED, ((6, 2), 75, True)),
        "attention.passes:Work.backward",
        ("dp.sub_(self._row_term(p, dp, do, term, heads, rows)).mul_(p)", "dp.mul_(p)"),
    ),
    mutate(
        "scale of scores forgotten in dQ",
        Check(UNQUANTISED, ((6, 2), 75, True)),
        "attention.passes:Work.backward",
        ("k_part, self.scale", "k_part"),
    ),
    mutate(
        "a query sees the next key",
        Check(UNQUANTISED, ((1, 1), 64, True)),
        "attention.tiles:_later",
        ("triu_(1)", "triu_(2)"),
    ),
    mutate(
        "padded keys are seen",
        Check(UNQUANTISED, ((6, 2), 75, False)),
        "attention.tiles:Shape.mask",
        ("elif seen > self.keys:", "elif False:"),
    ),
]

MUTATIONS: list[Mutation] = [
    *ELEMENTS,
    *BLOCK_SCALES,
    *TENSOR_SCALE,
    *STOCHASTIC,
    *TRANSFORM,
    *LAYOUT,
    *LAYER,
    *ATTENTION,
]
