"""Model families, one module each; FAMILIES lists the model_types that the module builds."""
