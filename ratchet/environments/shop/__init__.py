"""A shop with search and product pages, in the style of WebShop."""
