//! Naming a fault: where the first thing is wrong, what kind of fault explains it, and what would overturn that verdict.
//!
//! `bisect` finds the first operation that diverges; `explain` says what each kind of the catalogue looks like;
//! `hypothesis` tries explanations out in the reference.

pub mod bisect;
pub mod explain;
pub mod hypothesis;
