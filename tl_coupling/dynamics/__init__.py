"""What blocks do together: their products, and the eigenvalues of each."""

# ruff: noqa: F401
from tl_coupling.dynamics.eigenvalues import (
    Eigenvalues,
    eigenvalues,
    jacobian_eigenvalues,
    leading_eigenvalues,
)
from tl_coupling.dynamics.factored import FactoredProduct, block_product
from tl_coupling.dynamics.products import Products, jacobian_products, products
from tl_coupling.dynamics.spans import ProductMap, product_map
from tl_coupling.jacobians import frozen_bias, frozen_jacobian

__all__ = [
    "block_product",
    "eigenvalues",
    "jacobian_eigenvalues",
    "jacobian_products",
    "leading_eigenvalues",
    "product_map",
    "products",
]
