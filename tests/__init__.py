"""First of all kvstrata, so that its BLAS is loaded before any test module imports mlx.core."""

import kvstrata as kvstrata
