"""What blocks do together: their products; the eigenvalues of each, and what is left of
each with its coefficients held constant.
"""

from tl_coupling.dynamics.depth_products import Products, jacobian_products, products
from tl_coupling.dynamics.eigenvalues import (
    Eigenvalues,
    eigenvalues,
    jacobian_eigenvalues,
    leading_eigenvalues,
)
from tl_coupling.dynamics.factored import FactoredProduct, block_product
from tl_coupling.dynamics.frozen_jacobians import frozen_bias, frozen_jacobian
from tl_coupling.dynamics.model_jacobians import model_jacobian
from tl_coupling.dynamics.runs import ProductMap, product_map

__all__ = [
    "Eigenvalues",
    "FactoredProduct",
    "ProductMap",
    "Products",
    "block_product",
    "eigenvalues",
    "frozen_bias",
    "frozen_jacobian",
    "jacobian_eigenvalues",
    "jacobian_products",
    "leading_eigenvalues",
    "model_jacobian",
    "product_map",
    "products",
]
__dir__ = __all__.copy
