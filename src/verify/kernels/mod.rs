//! Stage `kernels`: is every kernel right on this model's shapes and types, on this GPU?
mod case;
mod lab;
mod products;
mod weights;
