"""The text of web pages: decoded, reduced to what a snippet stands in, and that in processes of their own."""
