//! What people and machines read: terminal tables and JSON.

pub mod table;
