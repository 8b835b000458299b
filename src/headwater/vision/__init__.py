"""Vision: image files to RGB pixels, pixels to the tensors of a model, augmentation, and a cache of decoded pixels."""
