//! Metadata values, with the accessors that readers of metadata need.

use super::write::Put;

/// What follows from the list of value types: number in the file, variant, what it holds, its name in the format's
/// documentation.
macro_rules! types {
    ($($id:literal $variant:ident($element:ty) $name:literal,)*) => {
        /// A metadata value, as typed in the file.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)]
        pub enum Value {
            $($variant($element),)*
        }

        /// A metadata array, stored by element type.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)]
        pub enum Array {
            $($variant(Vec<$element>),)*
        }

        impl Array {
            /// Number of elements.
            pub fn len(&self) -> usize {
                match self { $(Array::$variant(v) => v.len(),)* }
            }

            /// Element `i` as a value of its own (strings are cloned).
            pub fn get(&self, i: usize) -> Option<Value> {
                Some(match self { $(Array::$variant(v) => Value::$variant(v.get(i)?.clone()),)* })
            }
        }

        impl Value {
            /// The name of the value's type, as the format's documentation has it.
            pub fn type_name(&self) -> &'static str {
                match self { $(Value::$variant(_) => $name,)* }
            }
        }

        impl std::fmt::Display for Value {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                if let Value::Str(v) = self {
                    return write!(f, "{v:?}");
                }
                match self { $(Value::$variant(v) => write!(f, "{v}"),)* }
            }
        }

        impl Put for Value {
            fn put(&self, out: &mut Vec<u8>) {
                match self { $(Value::$variant(v) => (u32::put(&$id, out), v.put(out)),)* };
            }
        }

        impl Put for Array {
            fn put(&self, out: &mut Vec<u8>) {
                match self { $(Array::$variant(v) => {
                    (u32::put(&$id, out), (v.len() as u64).put(out));
                    v.iter().for_each(|element| element.put(out));
                })* }
            }
        }
    };
}

types! {
    0 U8(u8) "u8",
    1 I8(i8) "i8",
    2 U16(u16) "u16",
    3 I16(i16) "i16",
    4 U32(u32) "u32",
    5 I32(i32) "i32",
    6 F32(f32) "f32",
    7 Bool(bool) "bool",
    8 Str(String) "string",
    9 Array(Array) "array",
    10 U64(u64) "u64",
    11 I64(i64) "i64",
    12 F64(f64) "f64",
}

impl Array {
    /// True for an array without elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl std::fmt::Display for Array {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "array of {}", self.len())
    }
}

impl Value {
    /// The value as an unsigned integer, whatever integer type the file used; `None` for negatives and other types.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            Value::I8(v) => v.try_into().ok(),
            Value::I16(v) => v.try_into().ok(),
            Value::I32(v) => v.try_into().ok(),
            Value::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// The value as a float, from either float type.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }

    /// The value as a truth value; integers count as C does: all but 0 are true.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Value::Bool(v) => Some(v),
            Value::I8(v) => Some(v != 0),
            Value::I16(v) => Some(v != 0),
            Value::I32(v) => Some(v != 0),
            Value::I64(v) => Some(v != 0),
            ref unsigned => unsigned.as_u64().map(|v| v != 0),
        }
    }

    /// The value as text.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(v) => Some(v),
            _ => None,
        }
    }

    /// The value as an array.
    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Value::Array(v) => Some(v),
            _ => None,
        }
    }
}
