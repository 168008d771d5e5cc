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
    _embedding_bag _embedding_bag_forward_only _cdist_forward _pdist_forward _euclidean_dist _trilinear _weight_norm_interface
    _fft_r2c _fft_c2r _fft_c2c _ctc_loss
    linalg_lu_factor_ex linalg_lu linalg_lu_solve linalg_solve_ex _linalg_solve_ex linalg_inv_ex linalg_cholesky_ex
    linalg_eigh _linalg_eigh linalg_eig linalg_eigvals _linalg_eigvals linalg_svd _linalg_svd _linalg_det _linalg_slogdet
    linalg_qr linalg_lstsq linalg_solve_triangular linalg_matrix_exp linalg_ldl_factor_ex linalg_ldl_solve
    linalg_householder_product linalg_cross triangular_solve cholesky cholesky_solve cholesky_inverse geqrf ormqr
    lu_unpack _lu_with_info _linalg_check_errors _assert_async _assert_scalar _functional_assert_async
"""

# functions of mathematical physics and statistics, ranges and losses whose kernels check or count what they read
SPECIAL = """
    digamma polygamma mvlgamma ldexp igamma igammac erfinv i0 special_i0e special_i1 special_i1e special_zeta special_ndtri
    special_log_ndtr special_erfcx special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_spherical_bessel_j0 special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
    special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
    frexp logspace tril_indices triu_indices hash_tensor nonzero_static histogram _histogramdd_bin_edges
    _histogramdd_from_bin_cts _histogramdd_from_bin_tensors segment_reduce renorm embedding_renorm _chunk_cat
    binary_cross_entropy multi_margin_loss multilabel_margin_loss_forward linalg_pinv
    torch_nn::_linear_cross_entropy_batch_chunked torch_nn::_linear_cross_entropy_batch_chunked_no_reduction
"""

# operators of backward that torch's own kernels compute: of library operators, and sums over indices
BACKWARD = """
    convolution_backward convolution_backward_overrideable mkldnn_convolution_backward _slow_conv2d_backward
    _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_fused_attention_overrideable_backward _flash_attention_backward _efficient_attention_backward
    embedding_dense_backward _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward unfold_backward
    max_pool2d_with_indices_backward max_pool3d_with_indices_backward avg_pool2d_backward avg_pool3d_backward
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward
    fractional_max_pool2d_backward fractional_max_pool3d_backward mkldnn_max_pool2d_backward
    upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward
    upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward upsample_bicubic2d_backward
    _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward
    grid_sampler_2d_backward grid_sampler_3d_backward _grid_sampler_2d_cpu_fallback_backward
    mkldnn_rnn_layer_backward _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell_backward
    _cdist_backward _pdist_backward _euclidean_dist_backward _ctc_loss_backward
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    multi_margin_loss_backward multilabel_margin_loss_backward rrelu_with_noise_backward
    batch_norm_backward _weight_norm_interface_backward masked_scatter_backward _segment_reduce_backward _embedding_bag_backward
"""

# operators that draw random numbers: they run in order, and only where the graph has them
RANDOM = """
    bernoulli rand randn randint rand_like randn_like randint_like randperm normal uniform native_dropout multinomial
    poisson binomial exponential geometric log_normal cauchy random normal_functional _fused_dropout rrelu_with_noise
    rrelu_with_noise_functional _standard_gamma _sample_dirichlet bernoulli_ alpha_dropout feature_dropout
"""


def _fill() -> None:
    for names, ordered in ((NAMES, False), (SPECIAL, False), (BACKWARD, False), (RANDOM, True)):
        for name in names.split():
            space, _, name = name.rpartition("::")
            packet = getattr(getattr(torch.ops, space or "aten"), name, None)
            if packet is not None:
                ROWS[packet] = Row("library", None, ordered=ordered)


_fill()
