//! Naming a fault: where the first thing is wrong, what kind of fault explains it, and what would overturn that verdict.
//!
//! `bisect` finds the first operation that diverges; `faults` is the catalogue, one file per kind, each with how to
//! inject the fault and how to explain what it looks like; `hypothesis` tries explanations out in the reference.

pub mod bisect;

pub mod faults;
pub mod hypothesis;
