"""Dataset readers: files -> lines -> rows -> examples, with every bad row counted and located."""
