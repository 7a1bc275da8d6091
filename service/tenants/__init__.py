"""Who a caller is, and what one tenant may ask for beside the others."""
