"""The other way to prune: encode and choose first, then submit what is left, image by image.

A second engine for tests. Its images are ordinary items of ordinary length, the text between them is
tokens, every position is right at admission: none of what a fused group needs is in it. It shares no
code with the plugin.
"""
