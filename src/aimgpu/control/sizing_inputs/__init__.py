"""What models are sized by: model files, the catalogue, measurements kept on this machine."""
