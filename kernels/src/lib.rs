//! The home of the CUDA sources, their manifest and their launch geometry.
//!
//! The crate is separate so that geometry stays testable on a machine without a GPU: it must never depend on a CUDA
//! binding. It holds no kernel yet; the CPU device in the root crate is the only one.
