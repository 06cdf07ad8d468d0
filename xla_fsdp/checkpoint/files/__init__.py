"""Files of tensors and small values, on disks and in object stores."""
