"""Library calls: operators that torch's own kernels compute (matrix products, convolution, attention, sort, random).

They count as native (strict mode accepts them). The table is names; all functional overloads of a name are meant.
"""

from __future__ import annotations

import torch

from .row import ROWS, Row

NAMES = """
    mm addmm bmm baddbmm addbmm mv addmv addr dot vdot _int_mm _scaled_mm _grouped_mm _addmm_activation
    convolution _convolution convolution_overrideable mkldnn_convolution _slow_conv2d_forward slow_conv3d_forward
    conv_depthwise3d _conv_depthwise2d slow_conv_transpose2d slow_conv_transpose3d slow_conv_dilated2d slow_conv_dilated3d
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable _flash_attention_forward
    _efficient_attention_forward _native_multi_head_attention _transformer_encoder_layer_fwd
    sort topk kthvalue argsort msort mode median nanmedian searchsorted bucketize isin histc
    scatter scatter_add scatter_reduce index_put _index_put_impl index_add index_copy index_fill index_reduce put masked_scatter
    _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate
    max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max_unpool2d max_unpool3d
    mkldnn_max_pool2d im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback
    mkldnn_rnn_layer _thnn_fused_lstm_cell _thnn_fused_gru_cell _cudnn_rnn
    _embedding_bag _embedding_bag_forward_only _cdist_forward _pdist_forward _euclidean_dist _trilinear
    _fft_r2c _fft_c2r _fft_c2c _ctc_loss
    linalg_lu_factor_ex linalg_lu linalg_lu_solve linalg_solve_ex _linalg_solve_ex linalg_inv_ex linalg_cholesky_ex
    linalg_eigh _linalg_eigh linalg_eig linalg_eigvals _linalg_eigvals linalg_svd _linalg_svd _linalg_det _linalg_slogdet
    linalg_qr linalg_lstsq linalg_solve_triangular linalg_matrix_exp linalg_ldl_factor_ex linalg_ldl_solve
    linalg_householder_product linalg_cross triangular_solve cholesky cholesky_solve cholesky_inverse geqrf ormqr
    lu_unpack _lu_with_info _linalg_check_errors _assert_async _assert_scalar _functional_assert_async
"""

# operators that draw random numbers: they run in order, and only where the graph has them
RANDOM = """
    bernoulli rand randn randint rand_like randn_like randint_like randperm normal uniform native_dropout multinomial
    poisson binomial exponential geometric log_normal cauchy random normal_functional _fused_dropout rrelu_with_noise
    rrelu_with_noise_functional _standard_gamma _sample_dirichlet bernoulli_ alpha_dropout feature_dropout
"""


def _fill() -> None:
    for names, ordered in ((NAMES, False), (RANDOM, True)):
        for name in names.split():
            packet = getattr(torch.ops.aten, name, None)
            if packet is not None:
                ROWS[packet] = Row("library", None, ordered=ordered)


_fill()
